"""Ranks that are threads of this process: they share memory as processes do, and take no time to start."""

from __future__ import annotations

import os
import threading
from typing import NoReturn

from inflight.config import EngineConfig
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.messages import Broken, RankStart, Report, decode_report, encode_report
from inflight.execution.parallel.rank_processes import OnEnd, OnReport
from inflight.execution.parallel.runner import follow
from inflight.layers.native.library import native_library
from inflight.loading.load import load_rank
from inflight.processes.channel import RemoteError


class ThreadRank:
    """Runs a rank in a thread; replaces `RankProcess`."""

    process_id = None

    def __init__(self, start: RankStart, on_report: OnReport, on_end: OnEnd) -> None:
        self.rank = start.rank
        self._start = start
        self._on_report = on_report
        self._on_end = on_end
        self._memory: RankMemory | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        if self._memory is not None:
            self._memory.lose()

    def join(self) -> None:
        self._thread.join()

    def _live(self) -> None:
        library = native_library()
        assert library is not None
        start = self._start
        self._memory = RankMemory(library, start.layout, start.rank, self._leave, os.dup(start.memory))
        try:
            follow(load_rank(EngineConfig.create(**start.options), self._memory), self._memory, self._report)
        except _LeftError:
            pass
        except Exception as error:
            self._report(Broken(RemoteError.from_exception(error)))
        self._on_end(self.rank, "ended")

    def _report(self, report: Report) -> None:
        self._on_report(self.rank, decode_report(encode_report(report)))

    def _leave(self, code: int) -> NoReturn:
        raise _LeftError(code)


class _LeftError(Exception):
    pass
