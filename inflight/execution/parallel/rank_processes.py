"""The processes of all ranks but the first, as rank 0 starts, instructs, watches and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from inflight.errors import DeviceLostError, InflightError
from inflight.execution.parallel.layout import RankLayout, RankMemory
from inflight.execution.parallel.messages import (
    Begin,
    Begun,
    Broken,
    Loaded,
    RankMessage,
    RankStart,
    ToFirst,
    decode_report,
    encode,
)
from inflight.layers.native.library import Library
from inflight.logs import JsonFormatter
from inflight.models.decoders.footprint import RankShare
from inflight.processes.channel import RemoteError
from inflight.processes.child import ChildHost, ChildProcess

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between checks of the heartbeats
MISSED_LOOKS = 6  # consecutive checks without a heartbeat after which a rank is lost
BEAT_EVERY = 100  # milliseconds
LAST_WORDS = 1.0  # seconds to wait for the reason of a loss


class RankProcesses:
    """All ranks but the first. The first failure of any of them is raised here and by every later call."""

    def __init__(
        self,
        library: Library,
        layout: RankLayout,
        shares: list[RankShare],
        build: str,
        options: dict[str, Any],
        devices: Sequence[str],
        start_timeout: float,
        on_progress: Callable[[], None],
    ) -> None:
        """`start_timeout`: the seconds without progress of any rank after which starting fails; `on_progress` is called
        whenever a rank makes progress."""
        self.layout = layout
        self._start_timeout = start_timeout
        self._on_progress = on_progress
        self.shares = shares  # of all ranks
        self.memory = RankMemory(library, layout, 0, self._lost)
        self._steps = self.memory.steps()
        self._changed = threading.Condition()
        self._loaded: dict[int, int | None] = {}  # by rank: the blocks that fit
        self._begun: set[int] = set()
        # When each rank that is not ready last made progress.
        self._unready = dict.fromkeys(range(1, layout.count), time.monotonic())
        self._progress_at = time.monotonic()  # when any rank did, including the first
        self._failure: InflightError | None = None
        self._closing = threading.Event()
        root = logging.getLogger()
        as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
        level = logging.getLogger("inflight").getEffectiveLevel()
        self.processes = [
            RankProcess(
                RankStart(
                    build,
                    options | {"device": devices[rank]},
                    rank,
                    layout,
                    self.memory.descriptor,
                    -1,
                    os.getpid(),
                    level,
                    "json" if as_json else "text",
                ),
                self._take_report,
                self._take_end,
            )
            for rank in range(1, layout.count)
        ]
        self._watch = threading.Thread(target=self._watch_beats, name="inflight-rank-watch", daemon=True)
        self._watch.start()

    # ---- messages to the ranks ----

    def send(self, message: RankMessage) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        self.check()
        self._steps.send(message)

    def wait_until_loaded(self) -> int | None:
        """Wait for all ranks; return the number of blocks that fit on each of them, where they have their own
        memory."""
        self._wait(lambda: len(self._loaded) == len(self.processes))
        return min((count for count in self._loaded.values() if count is not None), default=None)

    def begin(self, message: Begin) -> None:
        """Make all ranks allocate their memory, while this rank does the same."""
        with self._changed:
            self._begun.clear()
            self._progress_at = time.monotonic()
            self._unready = dict.fromkeys(range(1, self.layout.count), self._progress_at)
        self.send(message)

    def wait_until_begun(self) -> None:
        self._wait(lambda: len(self._begun) == len(self.processes))

    def note_progress(self) -> None:
        """Note that the first rank made progress loading: others may be waiting for it."""
        self._progress_at = time.monotonic()

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self._failure is not None:
            raise self._failure
        if self._closing.is_set():
            raise DeviceLostError("the ranks of this engine have been shut down")

    def fail(self, error: InflightError) -> None:
        """Fail the engine and end every wait of every rank."""
        with self._changed:
            if self._failure is None and not self._closing.is_set():
                self._failure = error
                self.memory.lose()
            self._changed.notify_all()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._watch.join()
        self.memory.lose()  # a device may be waiting for them
        self.memory.close()

    def _wait(self, happened: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or happened())
        self.check()

    # ---- reports, heartbeats and losses ----

    def _take_report(self, rank: int, report: ToFirst) -> None:
        if isinstance(report, Broken):
            error = report.error
            text = f"rank {rank} of {self.layout.count}: {error.text}"
            self.fail(RemoteError(error.class_name, text, error.notes, error.param, error.code).error())
            return
        with self._changed:
            self._progress_at = time.monotonic()
            if isinstance(report, Loaded):
                self._loaded[rank] = report.num_blocks
            elif isinstance(report, Begun):
                self._begun.add(rank)
            if isinstance(report, Loaded | Begun):
                self._unready.pop(rank, None)
            elif rank in self._unready:
                self._unready[rank] = self._progress_at
            self._changed.notify_all()
        self._on_progress()

    def _take_end(self, rank: int, how: str) -> None:
        self.fail(DeviceLostError(f"rank {rank} of {self.layout.count} {how}"))

    def _lost(self, code: int) -> NoReturn:
        """Raise the reason why a wait of rank 0 failed."""
        if code > 0:
            self._give_up(code - 1, "did not finish its part of a step")
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, LAST_WORDS)
        self.check()
        raise DeviceLostError("a rank of this engine was lost")

    def _give_up(self, rank: int, why: str) -> None:
        process = self.processes[rank - 1]
        self.fail(DeviceLostError(f"rank {rank} of {self.layout.count} (process {process.process_id}) {why}"))
        process.kill()

    def _watch_beats(self) -> None:
        """Watch heartbeats in a thread: a process that is stopped or starved sends none."""
        counters = {p.rank: ctypes.c_uint32.from_address(self.memory.beats(p.rank)) for p in self.processes}
        seen = dict.fromkeys(counters, 0)
        missed = dict.fromkeys(counters, 0)
        while not self._closing.wait(LOOK_EVERY):
            self._check_progress()
            for rank, counter in counters.items():
                alive = counter.value != seen[rank] or not counter.value  # 0: it is still starting
                seen[rank], missed[rank] = counter.value, 0 if alive else missed[rank] + 1
                if missed[rank] >= MISSED_LOOKS and self._failure is None:
                    self._give_up(rank, f"sent no heartbeat for {MISSED_LOOKS * LOOK_EVERY:g} seconds")

    def _check_progress(self) -> None:
        """Give up the rank that is furthest behind, once no rank has made progress for too long."""
        with self._changed:
            is_late = time.monotonic() - self._progress_at >= self._start_timeout
            latest = min(self._unready, key=self._unready.__getitem__, default=None)
        if is_late and latest is not None and self._failure is None:
            limit = f"{self._start_timeout:g} seconds while it was starting (start_timeout)"
            self._give_up(latest, f"made no progress for {limit}")


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
