"""Requests join and leave at every step, first come first served.

When the first in line needs more memory than is free, smaller requests close behind it may go first, so that
memory is not left idle; each time, it ages, and at `ageing` no one passes it any more. `ageing=0` is strict
first come first served.
"""

from collections.abc import Generator

from inflight.request import Request
from inflight.scheduling.policy import HEADROOM, Policy

LOOKAHEAD = 8


class Continuous(Policy):
    def __init__(self, ageing: int = 16, headroom: int = HEADROOM) -> None:
        super().__init__(headroom)
        self.ageing = ageing

    def candidates(self) -> Generator[Request, bool, None]:
        yield from super().candidates()
        passed: list[Request] = []
        for request in self.queue.head(LOOKAHEAD):
            admitted = (yield request) if passed else False  # the first in line has just been refused
            if admitted:
                for older in passed:
                    older.num_passed += 1
            else:
                passed.append(request)
            if any(older.num_passed >= self.ageing for older in passed):
                return
