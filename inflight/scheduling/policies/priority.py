"""Smaller priority values first, with ageing: `ageing` steps of waiting are worth one level.

At step t a request that came at step s has the effective priority `priority - (t - s) / ageing`. Comparing two
of them, t cancels: the order by `priority * ageing + s` never changes while they wait, so a heap keeps it.
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
