"""How requests were served before continuous batching: baselines for comparisons."""

from collections.abc import Iterable, Sequence

from inflight.request import Request
from inflight.scheduling.policy import Policy


class Sequential(Policy):
    """One request at a time."""

    def admits(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        return not running


class Static(Policy):
    """Batches that start, run and end together.

    A batch consists of the requests that are waiting when it opens, as far as rows and memory allow. Memory for the
    full length is allocated at once. A finished request keeps its row until all have finished.
    """

    def __init__(self) -> None:
        super().__init__()
        self._newest = -1  # arrival of the newest request seen
        self._last = -1  # arrival of the newest request that may join the open batch

    def push(self, request: Request, step: int) -> None:
        super().push(request, step)
        self._newest = max(self._newest, request.arrival)

    def candidates(self) -> Iterable[Request]:
        yield from super().candidates()
        if len(self):  # the next in line does not fit: the batch is complete
            self._last = -1

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        if not running:
            self._last = self._newest
        return request.arrival <= self._last

    def memory_to_admit(self, request: Request, running: Sequence[Request]) -> int:  # noqa: ARG002
        return request.num_to_compute

    def allocates_at_once(self) -> bool:
        return True

    def leaves(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        return not running
