"""Smaller priority values first, with ageing: waiting for `ageing` steps is worth one level.

At step t, a request that arrived at step s has the effective priority `priority - (t - s) / ageing`. When two requests
are compared, t cancels out, so the order by `priority * ageing + s` never changes while they wait: a heap suffices.
"""

from inflight.request import Request
from inflight.scheduling.policy import HEADROOM, Policy


class Priority(Policy):
    def __init__(self, ageing: int = 256, headroom: int = HEADROOM) -> None:
        super().__init__(headroom)
        self.ageing = ageing

    def push(self, request: Request, step: int) -> None:
        if request.record.num_preemptions == 0:
            request.order = request.priority * self.ageing + step
        self.queue.push(request)
