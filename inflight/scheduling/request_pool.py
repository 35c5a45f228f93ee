"""The requests in the engine, and what they hold: rows, blocks, resident tokens.

     add                admission              last token          policy.leaves
────────────► WAITING ─────────────► RUNNING ─────────────► LINGERING ─────────────► FINISHED
                 ▲      preemption      │         at once, unless the policy keeps it
                 └──────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import EngineError
from inflight.events import Delta, KVUsage
from inflight.kv import BlockManager
from inflight.request import Phase, Request, Status
from inflight.scheduling.attribution import Attribution
from inflight.scheduling.policy import Policy
from inflight.scheduling.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that no step exceeds."""

    max_num_seqs: int  # requests that hold a row
    max_num_batched_tokens: int  # tokens computed in one step
    max_kv_tokens: int  # tokens resident across all running requests
    num_stages: int = 1  # steps computed at once by different pipeline stages; they share no request


class RequestPool:
    """Tracks requests and their resources from arrival to the last delta."""

    def __init__(self, limits: Limits, policy: Policy, blocks: BlockManager) -> None:
        self.policy = policy
        self.blocks = blocks
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.lingering: list[Request] = []  # finished, but kept by the policy
        self.counts = TokenCounts()
        self.num_preemptions = 0
        self.attribution = Attribution()
        # Every running request must be able to get a token in every step.
        num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def usage(self) -> KVUsage:
        return self.blocks.usage(self.counts.num_resident)

    def publish(self, request: Request) -> None:
        """Make the request's full blocks available to others, even in the step that fills them.

        That is safe because a step writes all its KV before it reads any. Call it only once no preemption can withdraw
        the request from that step.
        """
        self.blocks.publish(request, min(request.num_computed, len(request.token_ids)))

    # ---- life cycle ----

    def add(self, request: Request, step: int) -> None:
        if request.request_id in self.requests:
            raise EngineError(f"request id {request.request_id!r} is already in use")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.attribution.enter(request, Phase.QUEUED, request.record.arrived_at)
        self.policy.push(request, step)

    def admit(self, request: Request, hits: list[int], num_tokens: int, now: float) -> None:
        """Give a waiting request a row, the cached blocks that it shares, and blocks for `num_tokens` in total."""
        self.policy.remove(request)
        self.blocks.attach(request, hits)
        self.counts.admit(request)
        self.blocks.grow(request, num_tokens)
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        self.attribution.enter(request, Phase.PREFILLING, now)
        self.running.append(request)

    def preempt(self, request: Request, step: int, now: float) -> None:
        """Put a running request back into the queue; it will recompute its tokens."""
        self.running.remove(request)
        self._leave(request)
        request.status = Status.WAITING
        self.attribution.enter(request, Phase.PREEMPTED, now)
        request.record.num_preemptions += 1
        self.num_preemptions += 1
        self.policy.push(request, step)

    def abort(self, request: Request, now: float, reason: str = "abort") -> tuple[int, list[Delta]]:
        """End a request in any state. Return the number of blocks freed, and the deltas."""
        if request.status is Status.WAITING:
            self.policy.remove(request)
            num_freed = 0
        else:
            (self.running if request.status is Status.RUNNING else self.lingering).remove(request)
            num_freed = self._leave(request)
        request.record.finish_reason = request.record.finish_reason or reason
        delta = self._end(request, Delta(request.request_id, []), now)
        return num_freed, [*self.retire(now), delta]

    def finish(self, ended: list[tuple[Request, Delta]], now: float) -> None:
        """Finish requests that have all tokens. The deltas become their last ones unless the policy keeps them."""
        for request, _ in ended:
            if request.status is Status.WAITING:  # preempted while its last result was in flight
                self.policy.remove(request)
            else:
                request.status = Status.LINGERING
        self.running = [request for request in self.running if request.status is Status.RUNNING]
        for request, delta in ended:
            if request.status is Status.WAITING:
                self._end(request, delta, now)
            elif self.policy.leaves(request, self.running):
                self._leave(request)
                self._end(request, delta, now)
            else:
                self.attribution.enter(request, Phase.HELD, now)
                self.lingering.append(request)

    def retire(self, now: float) -> list[Delta]:
        """Release the finished requests that the policy no longer keeps."""
        deltas = []
        for request in self.lingering[:]:
            if self.policy.leaves(request, self.running):
                self.lingering.remove(request)
                self._leave(request)
                deltas.append(self._end(request, Delta(request.request_id, []), now))
        return deltas

    def release(self, request: Request) -> int:
        """Free only the request's blocks. Return how many became free."""
        self.counts.release(request)
        return self.blocks.free(request)

    def _leave(self, request: Request) -> int:
        """Free the request's row and blocks. Return how many blocks became free."""
        self._free_rows.append(request.row)
        request.row = -1
        return self.release(request)

    def _end(self, request: Request, delta: Delta, now: float) -> Delta:
        """Remove the request, and complete its record and its last delta."""
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        self.attribution.enter(request, Phase.OVER, now)
        record = request.record
        record.finished_at = now
        record.num_output_tokens = request.num_output_tokens
        delta.finish_reason = record.finish_reason
        delta.stop_token_id = record.stop_token_id
        delta.record = record
        return delta

    # ---- checks ----

    def check_idle(self) -> None:
        """Assert in constant time that an engine without requests holds nothing."""
        num_resident = self.counts.num_resident
        assert num_resident == 0, f"{num_resident} tokens are resident in an idle engine"
        assert self.blocks.pool.num_used == 0, (
            f"{self.blocks.pool.num_used} blocks are used in an idle engine"
        )

    def check(self) -> None:
        """Assert that every block and token is accounted for. Walks all blocks: for tests."""
        self.blocks.check([*self.running, *self.lingering])
        num_resident = sum(request.num_computed for request in (*self.running, *self.lingering))
        assert num_resident == self.counts.num_resident, "resident tokens are miscounted"
