"""The requests in the engine, and what they hold: rows, blocks, resident tokens.

     add                admission              last token          policy.leaves
────────────► WAITING ─────────────► RUNNING ─────────────► LINGERING ─────────────► FINISHED
                 ▲      preemption      │         at once, unless the policy keeps it
                 └──────────────────────┘

`TokenCounts` is the only place where the token counts of a request change, and `Attribution` attributes its latency to
causes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from inflight.errors import EngineError
from inflight.events import QUEUE_CAUSES, Delta, KVUsage, TimeBreakdown
from inflight.kv.block_manager import BlockManager
from inflight.kv.prefix_cache import PrefixHit
from inflight.request import Phase, Request, Status
from inflight.scheduling.policy import Policy


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that no step exceeds."""

    max_num_seqs: int  # requests that hold a row
    max_num_batched_tokens: int  # tokens computed in one step
    max_kv_tokens: int  # tokens resident across all running requests
    num_stages: int = 1  # steps computed at once by different pipeline stages; they share no request
    max_samples: int = sys.maxsize  # tokens sampled in one step


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
        self._ended: list[Request] = []  # since the last call of `take_ended`
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

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, now: float) -> None:
        """Give a waiting request a row, the cached blocks that it shares, and blocks for `num_tokens` in total."""
        self.policy.remove(request)
        self.blocks.attach(request, hit)
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
        self._ended.append(request)
        self.attribution.enter(request, Phase.OVER, now)
        record = request.record
        record.finished_at = now
        record.num_output_tokens = request.num_output_tokens
        delta.finish_reason = record.finish_reason
        delta.stop_token_id = record.stop_token_id
        delta.record = record
        return delta

    def take_ended(self) -> list[Request]:
        """Return the requests that have ended since the last call."""
        ended = self._ended
        if ended:
            self._ended = []
        return ended

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
        holders = (*self.running, *self.lingering)
        num_resident = sum(request.num_computed + request.num_drafted for request in holders)
        assert num_resident == self.counts.num_resident, "resident tokens are miscounted"


class TokenCounts:
    """Updates how many tokens a request has, has computed and has in flight. `Request` draws how the counts relate.

    Every change of these counts is made here, so that a new way to gain or lose tokens has to be right only once:

        admit, release     a request gets blocks, which may already hold its prefix; it gives them back
        decode, schedule   a step being formed computes tokens of the request, and may sample one more
        draft              the same step verifies drafts, whose KV it writes
        withdraw           the request is preempted while that step is being formed
        accept, complete   the step is collected: the sampled tokens are known, or nothing was sampled
        fail               the step failed, and whatever was in flight is lost
    """

    __slots__ = ("num_resident", "num_verifying")

    def __init__(self) -> None:
        self.num_resident = 0  # computed tokens and drafts of all requests that hold blocks
        self.num_verifying = 0  # requests with drafts in flight

    def admit(self, request: Request) -> None:
        """Count the tokens of the shared blocks that the request's table begins with as computed."""
        request.num_computed = request.num_cached = request.kv_capacity
        self.num_resident += request.num_computed

    def release(self, request: Request) -> None:
        """Count nothing as computed any more: the request gives up its blocks."""
        self.num_resident -= request.num_computed
        request.num_computed = 0
        self._drop_drafts(request)

    def decode(self, request: Request) -> None:
        """Schedule the one token that the request is behind, and sample another one."""
        num_tokens = request.num_tokens
        request.num_computed = num_tokens
        request.num_tokens = num_tokens + 1
        request.num_in_flight += 1
        self.num_resident += 1

    def schedule(self, request: Request, count: int) -> tuple[bool, bool]:
        """Schedule the next `count` tokens. Return whether that is all it has, and whether another one is sampled."""
        request.num_computed += count
        self.num_resident += count
        catches_up = request.num_computed == request.num_tokens
        samples = catches_up and request.num_tokens < request.max_total
        request.num_tokens += samples
        request.num_in_flight += catches_up
        return catches_up, samples

    def draft(self, request: Request, count: int) -> None:
        """Schedule drafts behind the token that was scheduled last."""
        request.num_drafted = count
        self.num_resident += count
        self.num_verifying += 1

    def _drop_drafts(self, request: Request) -> None:
        if request.num_drafted:
            self.num_resident -= request.num_drafted
            self.num_verifying -= 1
            request.num_drafted = 0

    def withdraw(self, request: Request, catches_up: bool, samples: bool) -> None:
        """Take back what `decode` or `schedule` counted as in flight. `release` follows, and forgets the rest."""
        request.num_tokens -= samples
        request.num_in_flight -= catches_up

    def accept(self, request: Request, num_accepted: int) -> None:
        """Count the tokens that a step sampled: `num_accepted` in place of the one that was in flight.

        All but the last of them were drafts, whose KV the step has written. Nothing is resident for a request that was
        preempted meanwhile.
        """
        request.num_in_flight -= 1
        if num_accepted > 1:
            request.num_tokens += num_accepted - 1
        if request.num_drafted:
            request.num_computed += num_accepted - 1
            self.num_resident += num_accepted - 1
            self._drop_drafts(request)

    def complete(self, request: Request) -> None:
        """Count an entry that caught up with its request and sampled nothing, or whose result is dropped."""
        request.num_in_flight -= 1
        self._drop_drafts(request)

    def fail(self, request: Request) -> None:
        """Return to the tokens that are known."""
        request.num_in_flight = 0
        self._drop_drafts(request)
        request.num_tokens = len(request.token_ids)


@dataclass(slots=True)
class Attribution:
    """Attributes the latency of every request to its causes.

    A request is in one phase at a time, and phases follow each other without a gap, so they add up to its latency. Time
    that many requests spend waiting together is measured once, by engine-wide clocks that only advance: one per reason
    why no request was admitted, and one for the time that prompts added to steps. A request remembers the readings when
    its phase began, so the cost of a step does not depend on how many requests wait. Times are passed in.
    """

    _waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUE_CAUSES, 0.0))
    cause: str = QUEUE_CAUSES[0]  # why requests are waiting now
    _waited_until: float = 0.0
    _prompt_delay: float = 0.0  # seconds that prompts have added to steps
    _updated_at: float = 0.0  # the end of the last step
    _plain_seconds: float | None = None  # duration of the last step without prompts

    # ---- the engine ----

    def set_queue_cause(self, cause: str, now: float) -> None:
        """Attribute waiting time from now on to this cause."""
        self._run_queue_clock(now)
        self.cause = cause

    def _run_queue_clock(self, now: float) -> None:
        self._waited[self.cause] += max(0.0, now - self._waited_until)
        self._waited_until = max(now, self._waited_until)

    def step_ended(self, now: float, prompt_share: float) -> None:
        """Account for a step that was collected; `prompt_share` of its tokens belonged to prompts."""
        seconds = now - self._updated_at
        self._updated_at = now
        if not prompt_share:
            self._plain_seconds = seconds
        elif self._plain_seconds is None:
            self._prompt_delay += prompt_share * seconds
        else:
            self._prompt_delay += max(0.0, seconds - self._plain_seconds)

    def step_failed(self, now: float) -> None:
        self._updated_at = now

    # ---- requests ----

    def enter(self, request: Request, phase: Phase, now: float) -> None:
        """End the request's phase and begin another."""
        request.record.breakdown = self.breakdown(request, now)
        request.phase, request.phase_at = phase, now
        if phase is Phase.QUEUED:
            self._run_queue_clock(now)
            request.phase_clocks = tuple(self._waited.values())
        elif phase is Phase.DECODING:
            request.phase_clocks = (self._prompt_delay,)

    def breakdown(self, request: Request, now: float) -> TimeBreakdown:
        """Return where the request's time went until now."""
        earlier, seconds = request.record.breakdown, now - request.phase_at
        match request.phase:
            case Phase.QUEUED:
                self._run_queue_clock(now)
                waited = zip(QUEUE_CAUSES, self._waited.values(), request.phase_clocks, strict=True)
                return replace(earlier, queue={cause: after - before for cause, after, before in waited})
            case Phase.PREFILLING:
                return replace(earlier, prefill=earlier.prefill + seconds)
            case Phase.DECODING:
                others = min(seconds, self._prompt_delay - request.phase_clocks[0])
                return replace(
                    earlier,
                    decode=earlier.decode + seconds - others,
                    prefill_of_others=earlier.prefill_of_others + others,
                )
            case Phase.PREEMPTED:
                return replace(earlier, preempted=earlier.preempted + seconds)
            case Phase.HELD:
                return replace(earlier, held=earlier.held + seconds)
            case Phase.NEW | Phase.OVER:
                return earlier
