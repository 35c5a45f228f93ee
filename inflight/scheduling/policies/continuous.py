"""Continuous batching: requests join and leave at every step, and short prompts do not wait for long ones.

The order is first-come-first-served. A prompt is short while at most `short` of its tokens are left to compute, not
counting tokens in the prefix cache. Whenever a long prompt runs or is first in line, a quarter of what decodes leave of
a step is reserved for short prompts, so a short prompt begins in the next step however many long ones there are. Long
prompts get the unused part of the reserve, and short ones never take more than the reserve from them.

When the first in line needs more memory than is free, smaller requests close behind it may pass it, so that memory is
not left idle. Once `ageing` requests have passed it, no more may. `ageing=0` is strict first-come-first-served.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from inflight.request import Request
from inflight.scheduling.policy import HEADROOM, Policy, WaitingQueue

LOOKAHEAD = 8
SHORT = 256
RESERVED_PART = 4  # one token in four is reserved for short prompts


class Continuous(Policy):
    def __init__(self, ageing: int = 16, headroom: int = HEADROOM, short: int = SHORT) -> None:
        super().__init__(headroom)
        self.ageing = ageing
        self.short = short
        self._short_queue = WaitingQueue()  # the short prompts in the queue
        # Waiting prompts that are short only if they have prefix hits.
        self._unsorted: deque[Request] = deque()
        self._num_ahead = 0  # requests that passed the first in line in this step
        self._num_left: Callable[[Request], int] = lambda request: request.num_tokens

    def set_num_left(self, num_left: Callable[[Request], int]) -> None:
        self._num_left = num_left

    # ---- the queue ----

    def push(self, request: Request, step: int) -> None:
        super().push(request, step)
        # A short request that was preempted would only be preempted again by the prompt that needs its memory.
        if request.record.num_preemptions == 0:
            if request.num_tokens <= self.short:
                self._short_queue.push(request)
            else:
                self._unsorted.append(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._short_queue.remove(request)
        if not len(self.queue):
            self._unsorted.clear()

    def candidates(self) -> Iterable[Request]:
        yield from super().candidates()
        passed: list[Request] = []
        for request in self.queue.head(LOOKAHEAD):
            if passed:
                yield request
            else:  # the first in line was just refused
                request.num_passed += self._num_ahead
            if request in self.queue:
                passed.append(request)
            else:
                for older in passed:
                    older.num_passed += 1
            if any(older.num_passed >= self.ageing for older in passed):
                return

    # ---- short prompts ----

    def tokens_ahead(self, prompts: Sequence[Request], budget: int) -> int:
        self._num_ahead = 0
        self._find_short()
        if not len(self._short_queue):
            return 0
        first = self.queue.first()
        assert first is not None
        is_long = first.num_tokens > self.short and first not in self._short_queue
        num_left = [request.num_tokens - request.num_computed for request in prompts]
        if not is_long and max(num_left, default=0) <= self.short:
            return 0  # no long prompt is in the way
        return max(
            0, budget // RESERVED_PART - sum(remaining for remaining in num_left if remaining <= self.short)
        )

    def _find_short(self) -> None:
        """Look up prefix hits of the next few prompts: a bounded number per step, because it hashes them."""
        num_checked = 0
        while self._unsorted and num_checked < LOOKAHEAD:
            request = self._unsorted.popleft()
            if request in self.queue:
                num_checked += 1
                if self._num_left(request) <= self.short:
                    self._short_queue.push(request)

    def candidates_ahead(self, prompts: Sequence[Request]) -> Iterable[Request]:  # noqa: ARG002
        first = self.queue.first()
        while (request := self._short_queue.first()) is not None:
            if (
                first is not None
                and request is not first
                and first.num_passed + self._num_ahead >= self.ageing
            ):
                return
            if request.num_tokens > self.short < self._num_left(request):  # its prefix has been evicted
                self._short_queue.remove(request)
                continue
            yield request
            if request in self.queue:
                return
            if request is first:
                first = self.queue.first()
            else:
                self._num_ahead += 1

    def prompts(self, running: Sequence[Request]) -> Sequence[Request]:
        if len(running) < 2:
            return running
        return sorted(running, key=lambda request: request.num_tokens - request.num_computed > self.short)
