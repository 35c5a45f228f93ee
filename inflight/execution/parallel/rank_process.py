"""The process of one rank, as rank 0 sees it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

import msgspec

from inflight.execution.parallel.messages import RankStart, ToFirst, decode_report
from inflight.processes.child import ChildHost, ChildProcess

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.execution.parallel.worker")

OnReport = Callable[[int, ToFirst], None]  # rank and report
OnEnd = Callable[[int, str], None]  # rank and how it ended


class RankProcess:
    """The process of one rank other than the first, and the thread that starts it and reads its reports."""

    def __init__(self, start: RankStart, on_report: OnReport, on_end: OnEnd) -> None:
        self.rank = start.rank
        self._start = start
        self._on_report = on_report
        self._on_end = on_end
        self._child: ChildProcess | None = None
        self._killed = False
        self._thread = threading.Thread(target=self._run, name=f"inflight-rank-{self.rank}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._killed = True
        if self._child is not None:
            self._child.kill()

    def join(self) -> None:
        self._thread.join()

    @property
    def process_id(self) -> int | None:
        return None if self._child is None else self._child.process_id

    def _run(self) -> None:
        try:
            end = self._run_child()
        except Exception as error:  # a rank that cannot be started must not keep the first one waiting
            end = f"could not be started: {error}"
        self._on_end(self.rank, end)

    def _run_child(self) -> str:
        reading, writing = os.pipe()
        host = ChildHost(f"rank {self.rank}", COMMAND, descriptors=(self._start.memory, writing))
        child = self._child = ChildProcess(host, msgspec.structs.replace(self._start, reports=writing))
        if self._killed:
            child.kill()
        with open(writing, "wb") as writer, open(reading, "rb") as reports:

            def read_reports() -> None:
                writer.close()  # so that the reports end with the process
                for line in reports:
                    with contextlib.suppress(msgspec.DecodeError):  # cut off by its end
                        self._on_report(self.rank, decode_report(line))

            end = child.run_and_follow(read_reports)
        return f"(process {child.process_id}) ended {end}"
