"""One rank's process, as rank 0 sees it: started, listened to and waited for by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from inflight.engine.remote.child_process import end_of_child, start_child, tell_child
from inflight.execution.parallel.messages import RankStart, ToFirst, decode_report

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.execution.parallel.worker")

OnReport = Callable[[int, ToFirst], None]  # rank, and what it says
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
        try:
            how = self._run()
        except Exception as error:  # whoever waits for the rank must not wait for ever
            how = f"could not be started: {error}"
        self._on_end(self.rank, how)

    def _run(self) -> str:
        """From its start to its end. How it ended."""
        reading, writing = os.pipe()
        start = msgspec.structs.replace(self._start, reports=writing)
        with open(reading, "rb") as reports:
            try:
                self._process = process = start_child(COMMAND, (start.memory, writing))
            finally:
                os.close(writing)
            if self._killed:  # before it was there
                process.kill()
            tell_child(process, start)
            for line in reports:  # until it is gone
                with contextlib.suppress(msgspec.DecodeError):  # cut off by its end
                    self._on_report(self.rank, decode_report(line))
        return f"(process {process.pid}) ended {end_of_child(process)}"
