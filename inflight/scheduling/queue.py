"""The waiting requests in order of a key that is fixed when they arrive."""

from __future__ import annotations

from heapq import heappop, heappush

from inflight.request import Request


class WaitingQueue:
    """A heap on (`request.order`, `request.arrival`). Removal is lazy, so every operation is O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        heappush(self._heap, (request.order, request.arrival, request))
        self._members.add(request)

    def remove(self, request: Request) -> None:
        self._members.discard(request)
        self._drop_removed()

    def _drop_removed(self) -> None:
        heap, members = self._heap, self._members
        while heap and heap[0][2] not in members:
            heappop(heap)

    def first(self) -> Request | None:
        return self._heap[0][2] if self._heap else None

    def head(self, count: int) -> list[Request]:
        """The first `count` requests, in order."""
        taken: list[tuple[float, int, Request]] = []
        while self._heap and len(taken) < count:
            taken.append(heappop(self._heap))
            self._drop_removed()
        for entry in taken:
            heappush(self._heap, entry)
        return [request for _, _, request in taken]
