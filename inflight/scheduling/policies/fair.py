"""Fair sharing between tenants by the service they received, not by the requests they sent.

Every tenant has a virtual token counter. It counts prompt tokens when they are first computed or found in the prefix
cache, and output tokens when they are sampled, divided by the tenant's weight. In every step the tenant with the
smallest counter goes next, whether its prompt is running or waiting, so no tenant waits for the rest of another's
prompt. The requests of one tenant are served first-come-first-served. The counter of a tenant that becomes active is
raised to the smallest one of the active tenants, so idle time is not saved up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace

from inflight.request import Request, Status
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policy import HEADROOM, Policy, WaitingQueue

MAX_COUNTERS = 10_000  # beyond these, counters without effect are dropped


class Fair(Policy):
    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        prompt_cost: float = 1.0,
        output_cost: float = 2.0,
        headroom: int = HEADROOM,
    ) -> None:
        super().__init__(headroom)
        self.weights = dict(weights or {})
        self.prompt_cost = prompt_cost
        self.output_cost = output_cost
        self.counters: dict[str, float] = {}
        self._queues: dict[str, WaitingQueue] = {}  # by tenant: those with waiting requests
        self._heap: list[tuple[float, str]] = []  # (a possibly outdated counter, tenant); counters only grow
        self._in_heap: set[str] = set()
        self._prefilling: set[str] = set()  # tenants with partly computed prompts, as of the last step
        self._next_prefilling: set[str] = set()  # the same for the step being formed, so far
        self._last_active = ""  # the tenant whose queue became empty last
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request, step: int) -> None:  # noqa: ARG002
        tenant = request.tenant
        if tenant not in self._queues:
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self._floor())
            self._queues[tenant] = WaitingQueue()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heappush(self._heap, (self.counters[tenant], tenant))
        request.order = request.arrival
        self._queues[tenant].push(request)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        tenant = request.tenant
        queue = self._queues[tenant]
        queue.remove(request)
        self._num_waiting -= 1
        if not len(queue):
            del self._queues[tenant]
            self._last_active = tenant
            if len(self.counters) > MAX_COUNTERS:
                self._forget()

    def _forget(self) -> None:
        """Drop the counters that `push` would raise to the floor anyway."""
        floor = self._floor()
        active = {*self._queues, *self._prefilling, self._last_active}
        self.counters = {t: count for t, count in self.counters.items() if count > floor or t in active}

    def _floor(self) -> float:
        """Return the counter that a newly active tenant starts from.

        It is the smallest one of the tenants with waiting requests or running prompts or, if there are none, that of
        the tenant that was active last.
        """
        least = self._least()
        active = self._prefilling if least is None else {*self._prefilling, least}
        return min(self.counters.get(tenant, 0.0) for tenant in active or (self._last_active,))

    def _least(self) -> str | None:
        """Return the tenant with waiting requests that has the smallest counter."""
        heap = self._heap
        while heap:
            count, tenant = heap[0]
            if tenant not in self._queues:
                heappop(heap)
                self._in_heap.discard(tenant)
            elif count < self.counters[tenant]:
                heapreplace(heap, (self.counters[tenant], tenant))
            else:
                return tenant
        return None

    def candidates(self) -> Iterable[Request]:
        while (tenant := self._least()) is not None:
            request = self._queues[tenant].first()
            assert request is not None
            yield request
            if request.status is Status.WAITING:
                return

    def tokens_ahead(self, prompts: Sequence[Request], budget: int) -> int:
        return budget if self._next_ahead({request.tenant for request in prompts}) is not None else 0

    def candidates_ahead(self, prompts: Sequence[Request]) -> Iterable[Request]:
        running = {request.tenant for request in prompts}
        while (request := self._next_ahead(running)) is not None:
            yield request
            if request.status is Status.WAITING:
                return

    def _next_ahead(self, running: set[str]) -> Request | None:
        """Return the first request of the waiting tenant with the smallest counter.

        Return None if that tenant, or one with a smaller counter, has a running prompt.
        """
        tenant = self._least()
        if not running or tenant is None or tenant in running:
            return None
        if self.counters[tenant] > min(self.counters.get(other, 0.0) for other in running):
            return None
        return self._queues[tenant].first()

    def prompts(self, running: Sequence[Request]) -> Sequence[Request]:
        self._next_prefilling.update(request.tenant for request in running)
        if len(running) < 2:
            return running
        counters = self.counters
        return sorted(running, key=lambda request: counters.get(request.tenant, 0.0))

    def victim(self, candidates: Sequence[Request]) -> Request:
        counters = self.counters
        return max(candidates, key=lambda request: (counters.get(request.tenant, 0.0), request.arrival))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)

    def _charge(self, tenant: str, cost: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / self.weights.get(tenant, 1.0)

    def on_admit(self, request: Request) -> None:
        self._charge_prompt(request)
        if request.num_computed < request.num_prompt_tokens:
            self._next_prefilling.add(request.tenant)

    def on_batch(self, step: ScheduledStep) -> None:
        self._prefilling, self._next_prefilling = self._next_prefilling, set()
        for request, samples in zip(step.requests, step.samples, strict=True):
            if request.num_charged < request.num_prompt_tokens:
                self._charge_prompt(request)
            if samples:
                self._charge(request.tenant, self.output_cost)

    def _charge_prompt(self, request: Request) -> None:
        """Charge for the prompt tokens that have been scheduled for the first time."""
        num_tokens = min(request.num_computed, request.num_prompt_tokens)
        if num_tokens > request.num_charged:
            self._charge(request.tenant, self.prompt_cost * (num_tokens - request.num_charged))
            request.num_charged = num_tokens
