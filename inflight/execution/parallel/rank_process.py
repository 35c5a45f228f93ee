"""One rank's process, as rank 0 sees it: started, listened to and waited for by a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from inflight.execution.parallel.messages import Begun, Broken, Loaded, RankStart, decode_report

logger = logging.getLogger(__name__)

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.execution.parallel.worker")

OnReport = Callable[[int, Loaded | Begun | Broken], None]  # rank, and what it says
OnEnd = Callable[[int, str], None]  # rank, and how it ended


class RankProcess:
    """The thread that starts a process must live as long as it does: for the system, it is the parent."""

    def __init__(self, start: RankStart, on_report: OnReport, on_end: OnEnd) -> None:
        self.rank = start.rank
        self._start = start
        self._on_report = on_report
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._thread = threading.Thread(target=self._live, name=f"inflight-rank-{self.rank}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def join(self) -> None:
        self._thread.join()

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _live(self) -> None:
        reading, writing = os.pipe()
        start = msgspec.structs.replace(self._start, reports=writing)
        try:
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=2,  # whatever it prints is no output of this process
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # Ctrl-C is for the parent
                pass_fds=(start.memory, writing),
            )
        except OSError as error:
            os.close(reading)
            self._on_end(self.rank, f"could not be started: {error}")
            return
        finally:
            os.close(writing)
        self._process = process
        if self._killed:  # before it was there
            process.kill()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()  # not closed: its end is how the process learns of ours
        with open(reading, "rb") as reports:
            for line in reports:  # until it is gone
                with contextlib.suppress(msgspec.DecodeError):  # cut off by its end
                    self._on_report(self.rank, decode_report(line))
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._on_end(self.rank, f"(process {process.pid}) ended {_how(code)}")


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with code {code}"
