"""The waiting requests in order of a key that is fixed when they arrive."""

from __future__ import annotations

from heapq import heappop, heappush

from inflight.request import Request

_Entry = tuple[float, int, Request]


class WaitingQueue:
    """A heap on (`request.order`, `request.arrival`). Removal is lazy, so every operation is O(log n).

    A request that comes back may still have its old entry in the heap: the live one is the one that is named here.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._live: dict[Request, _Entry] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def push(self, request: Request) -> None:
        entry = (request.order, request.arrival, request)
        self._live[request] = entry
        heappush(self._heap, entry)
        self._drop_dead()

    def remove(self, request: Request) -> None:
        self._live.pop(request, None)
        self._drop_dead()

    def _drop_dead(self) -> None:
        """The top of the heap is always live."""
        heap, live = self._heap, self._live
        while heap and live.get(heap[0][2]) is not heap[0]:
            heappop(heap)

    def first(self) -> Request | None:
        return self._heap[0][2] if self._heap else None

    def head(self, count: int) -> list[Request]:
        """The first `count` requests, in order."""
        taken: list[_Entry] = []
        while self._heap and len(taken) < count:
            taken.append(heappop(self._heap))
            self._drop_dead()
        for entry in taken:
            heappush(self._heap, entry)
        return [request for _, _, request in taken]
