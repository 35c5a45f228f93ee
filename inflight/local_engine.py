"""An engine in this process, stepped in the thread of whoever calls."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.engine import Command, EngineStats, RequestFeed, StepObserver
from inflight.frontend import Frontend
from inflight.garbage import paused_collection
from inflight.interrupts import held_interrupts
from inflight.loading import LoadedEngine
from inflight.offline import OfflineRun
from inflight.progress_bars import request_bar


class LocalEngine:
    """Implements `OfflineEngine`."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded  # which may get another core

    @property
    def frontend(self) -> Frontend:
        return self._loaded

    @property
    def description(self) -> str:
        return self._loaded.platform.describe()

    def compute(self, run: OfflineRun, show: bool) -> None:
        core = self._loaded.core
        feed = RequestFeed(core, run.requests, run.lazily)
        with paused_collection(), held_interrupts() as let_go:
            try:
                feed.fill()
                with request_bar(run.doing, run.num_requests, show) as advance:
                    while core.has_work or not feed.is_empty:
                        let_go()  # between two steps, where all books are in order
                        feed.fill()
                        deltas = core.step()
                        for delta in deltas:
                            if run.take(delta):
                                deltas += core.abort(delta.request_id, "stop")[1]
                        advance(deltas)
            except BaseException:  # Ctrl-C above all
                self._clear(feed.added)
                raise

    def _clear(self, request_ids: Iterable[str]) -> None:
        """Empty the engine after a run that broke off, so that it can go on."""
        core = self._loaded.core
        for request_id in request_ids:
            core.abort(request_id)
        while core.has_work:  # what is still in flight
            core.step()
        # A step that was cut short has not filled the blocks that it promised to the prefix cache.
        core.scheduler.blocks.drop_cache()

    def command(self, command: Command) -> None:
        self._loaded.core.obey(command)

    def stats(self) -> EngineStats:
        return self._loaded.core.stats()

    def observe(self, observer: StepObserver) -> None:
        self._loaded.core.observers.append(observer)

    def unobserve(self, observer: StepObserver) -> None:
        self._loaded.core.observers.remove(observer)

    def close(self) -> None:
        self._loaded.close()
