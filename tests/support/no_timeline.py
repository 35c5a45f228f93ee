"""The part of a client that shows an engine at work, for fakes that show nothing."""

from __future__ import annotations

from collections.abc import Callable

from inflight.engine.client import MemoryState, TimelineObserver
from inflight.timeline.chunks import TimelinePage, TimelineQuery


class NoTimeline:
    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:  # noqa: ARG002
        return TimelinePage([], {})

    async def read_memory(self, replica: str) -> MemoryState:
        raise NotImplementedError(replica)
