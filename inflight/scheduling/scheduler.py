"""Forms steps: which requests run, how many tokens of each, in which blocks. Choices are left to the policy.

There are no prefill and decode phases. A request has `num_tokens` and `num_computed`; in every step computed catches up
with total, and once it has, the step samples another token. Requests that are one token behind (decodes) are scheduled
first, those further behind (prompts, resumed requests) share the rest of the step, and then waiting requests are
admitted. A policy may reserve part of the step for waiting requests, which are then admitted ahead of running prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight.errors import EngineError, RequestError
from inflight.events import Delta, Preemption, RequestFailure
from inflight.kv.block_manager import BlockManager
from inflight.kv.prefix_cache import PrefixHit
from inflight.request import Request, Status
from inflight.scheduling.batch import Admission, Batch, Sampled, ScheduledStep
from inflight.scheduling.policy import CheckedPolicy, Policy, TokenBudget
from inflight.scheduling.quarantine import Quarantine
from inflight.scheduling.request_pool import Limits, RequestPool
from inflight.scheduling.results import end_with_errors, take_results


@dataclass(slots=True)
class SpeculationStats:
    """Totals of an engine."""

    num_drafts: int = 0  # entries with drafts
    num_drafted: int = 0  # tokens
    num_accepted: int = 0


class Speculation(Protocol):
    """Which tokens decodes verify beside their own (`drafts.py`)."""

    stats: SpeculationStats

    @property
    def waits(self) -> bool:
        """Whether drafts are worth waiting for the results of all steps in flight before the next one is formed."""

    read_ahead: int  # sampled tokens whose keys and values the predictor writes before it guesses: 0 or 1

    def num_wanted(self, step: ScheduledStep) -> int:
        """Return how many further tokens the model guesses for each request; 0: its predictor does not run."""

    def choose(self, step: ScheduledStep, room: int) -> Iterator[tuple[int, list[int]]]:
        """Yield entries, which all decode, and their drafts, together at most `room` tokens."""

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        """Take in the results of a step."""

    def observe(self, batch: Batch, seconds: float, waited: float = 0.0) -> None:
        """Take in how long a step took, and how long the device waited for it because of drafts."""

    def clear(self) -> None:
        """Forget what requests that have ended leave behind."""


class NoSpeculation:
    """Implements `Speculation` without drafts."""

    waits = False

    read_ahead = 0

    def __init__(self) -> None:
        self.stats = SpeculationStats()

    def num_wanted(self, step: ScheduledStep) -> int:  # noqa: ARG002
        return 0

    def choose(self, step: ScheduledStep, room: int) -> Iterator[tuple[int, list[int]]]:  # noqa: ARG002
        return iter(())

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        pass

    def observe(self, batch: Batch, seconds: float, waited: float = 0.0) -> None:
        pass

    def clear(self) -> None:
        pass


MAX_DRAFTS = (
    63  # of a request in a step: with the token before them, recurrent layers on GPUs take them as one piece
)


class Scheduler:
    """Forms steps from the requests in its pool, and takes in their results."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        blocks: BlockManager,
        token_budget: TokenBudget | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        most = blocks.max_tokens(limits.max_num_batched_tokens)
        self._max_kv_tokens = min(most, limits.max_kv_tokens)  # of a request on its own
        self.token_budget = token_budget or TokenBudget(limits.max_num_batched_tokens)
        self.speculation = speculation or NoSpeculation()
        self._checked = CheckedPolicy(policy)
        self._checked.set_num_left(self._num_left)
        self._quarantine = Quarantine(self._checked, self._lift_quarantine)
        self.pool = RequestPool(limits, self._checked, blocks)
        self._num_steps = 0
        self._now = 0.0  # the time passed to the current call
        self._preempted: list[Preemption] = []  # since the last step that was launched

    @property
    def policy(self) -> Policy:
        """The policy that decides now: the engine's own, checked, or the quarantine."""
        return self.pool.policy

    def add(self, request: Request) -> None:
        limit = self.limits.max_num_batched_tokens
        if not request.splittable and request.num_to_compute > limit:
            raise RequestError(
                f"request {request.request_id!r} has {request.num_to_compute} tokens and cannot be split: "
                f"a step has at most {limit} (max_num_batched_tokens)"
            )
        if request.max_tokens and request.num_tokens >= request.max_total:
            raise RequestError(
                f"request {request.request_id!r} already has all of its {request.max_tokens} output tokens"
            )
        if request.num_to_compute > self._max_kv_tokens:
            raise RequestError(
                f"request {request.request_id!r} may reach {request.num_to_compute} tokens: this engine has KV "
                f"memory for {self._max_kv_tokens}"
            )
        self.pool.add(request, self._num_steps)

    # ---- one step ----

    def schedule(self, now: float) -> ScheduledStep | None:
        """Return the next step, or None if nothing can be computed before a step in flight is collected."""
        self._now = now
        step = self._form()
        if not step.requests and step.preempted and self._is_stuck():
            step = self._form()  # others can use the memory of the preempted requests now
        if not step.requests and self._is_stuck():
            with self._checked.overruled():
                step = self._form()
        if not step.requests:
            return None
        step.preempted, self._preempted = self._preempted, []
        self._num_steps += 1
        step.set_copies(self.blocks.take_copies())
        step.kv = self.pool.usage()
        self.policy.on_batch(step)
        return step

    def _is_stuck(self) -> bool:
        """Return whether there are requests, but no result in flight that could change the policy's decision."""
        pool = self.pool
        return pool.has_work and not any(request.num_in_flight for request in pool.requests.values())

    def _form(self) -> ScheduledStep:
        step = ScheduledStep(Batch(self._num_steps))
        has_waiting = len(self.policy) > 0
        cause = "step"  # requests that arrive later wait for the next step
        if has_waiting:
            for request in self.policy.yields(self.pool.running):
                self._preempt(request, step, "policy")
        behind = self._schedule_decodes(step)
        max_tokens = self.token_budget.limit(len(step), len(behind) + len(self.policy))
        num_ahead = 0
        if has_waiting and not step.preempted and self.pool.num_free_rows:
            num_ahead = self._admit_ahead(behind, step, max_tokens)
        if behind:
            for request in self.policy.prompts(behind):
                if request.status is Status.RUNNING:  # an older one may have preempted it since
                    self._schedule_chunk(request, step, max_tokens)
            for request in behind:
                self.pool.publish(request)
            step.move_to_end(step.batch.num_decodes, num_ahead)
        if has_waiting:
            cause = "memory" if step.preempted else self._admit(self.policy.candidates(), step, max_tokens)
        self._add_drafts(step, max_tokens)
        self._preempted += step.preempted
        self.pool.attribution.set_queue_cause(cause if len(self.policy) else "step", self._now)
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> list[Request]:
        """Schedule one token of every request that is one token behind. Return those further behind."""
        behind = []
        # Hot loop: local names, and columns filled in place, because this runs for every decoding request.
        batch, requests, counts = step.batch, step.requests, self.pool.counts
        rows, starts = batch.rows, batch.starts
        max_resident = self.limits.max_kv_tokens
        running = Status.RUNNING
        for request in self._ready():
            start = request.num_computed
            num_tokens = request.num_tokens
            if start + 1 != num_tokens:
                behind.append(request)
                continue
            if num_tokens >= request.max_total or request.status is not running:
                # The last output is in flight and needs no KV; in a request without outputs, the last token does.
                if start < request.num_to_compute:
                    behind.append(request)
                continue
            full = start == request.kv_capacity or counts.num_resident >= max_resident
            if full and not self._allocate(request, 1, step):
                continue
            requests.append(request)
            rows.append(request.row)
            starts.append(start)
            batch.counts.append(1)
            batch.samples.append(True)
            counts.decode(request)
        batch.num_tokens = batch.num_decodes = len(requests)
        return behind

    def _add_drafts(self, step: ScheduledStep, max_tokens: int) -> None:
        """Let decodes verify drafts with the tokens and the memory that nobody else needs in this step."""
        blocks, counts, limits = self.blocks, self.pool.counts, self.limits
        num_wanted = self.speculation.num_wanted(step)
        room = min(
            max_tokens - step.batch.num_tokens,
            limits.max_kv_tokens - counts.num_resident,
            limits.max_samples - len(step),
        )
        for entry, token_ids in self.speculation.choose(step, room):
            num_others = len(self.pool.running)  # which may each need a block for the next step
            count = min(len(token_ids), MAX_DRAFTS)
            count, updates = blocks.make_room_for_drafts(step.requests[entry], count, num_others)
            if count:
                step.batch.tables += updates
                step.draft(entry, token_ids[:count], counts)
        if num_wanted:
            step.batch.wanted_drafts = [
                self._num_wanted(step, entry, num_wanted) if samples else 0
                for entry, samples in enumerate(step.samples)
            ]

    def _num_wanted(self, step: ScheduledStep, entry: int, most: int) -> int:
        """Return how many tokens behind the next one of an entry the model may guess, at most `most`.

        They end before the request does. To guess from the first of them, the predictor writes its keys and values, and
        so on: for these there are blocks.
        """
        request, read_ahead = step.requests[entry], self.speculation.read_ahead
        num_drafts = request.num_drafted
        count = min(most, request.max_total - request.num_tokens - num_drafts - 1)
        if count + read_ahead <= 1:
            return max(0, count)
        needed = num_drafts + read_ahead + count - 1
        if request.kv_capacity - request.num_computed >= needed:
            return count
        num_fit, updates = self.blocks.make_room_for_drafts(request, needed, len(self.pool.running))
        step.batch.tables += updates
        return max(1 - read_ahead, num_fit - num_drafts - read_ahead + 1)

    def _ready(self) -> list[Request]:
        """Return a copy of the running requests that this step may schedule; some may be preempted meanwhile.

        While drafts are verified, nobody knows where their request goes on, so it waits. With pipeline stages, a token
        in flight is not known yet when the first stage needs it. Its request waits for it while others decode, and
        every step takes its share of the decodes.
        """
        running, num_stages = self.pool.running, self.limits.num_stages
        if self.pool.counts.num_verifying:
            running = [request for request in running if not request.num_drafted]
        if num_stages == 1:
            return running[:]
        num_left = -(-len(running) // num_stages)  # decodes
        ready = []
        for request in running:
            if request.num_tokens > len(request.token_ids):
                continue
            if request.num_computed + 1 == request.num_tokens:
                num_left -= 1
                if num_left < 0:
                    continue
            ready.append(request)
        return ready

    def _schedule_chunk(self, request: Request, step: ScheduledStep, max_tokens: int) -> None:
        """Schedule a chunk of a running request that is several tokens behind."""
        num_remaining = request.num_tokens - request.num_computed
        budget = max_tokens - step.batch.num_tokens
        if num_remaining <= 0 or budget <= 0:
            return
        count = self._num_granted(request, num_remaining, budget, step)
        if count > 0 and self._allocate(request, count, step):
            step.put(request, count, self.pool.counts)

    def _num_granted(self, request: Request, num_remaining: int, budget: int, step: ScheduledStep) -> int:
        """Return how many of its remaining tokens a request gets.

        A request that cannot be split gets all or none. If the policy gives it any, it gets all, even beyond the step's
        budget, up to `max_num_batched_tokens`.
        """
        if request.splittable:
            return self.policy.tokens(request, min(num_remaining, request.max_chunk), budget)
        limit = self.limits.max_num_batched_tokens - step.batch.num_tokens
        fits = num_remaining <= limit and self.policy.tokens(request, num_remaining, limit) > 0
        return num_remaining if fits else 0

    # ---- memory ----

    def _allocate(self, request: Request, count: int, step: ScheduledStep) -> bool:
        """Allocate blocks for `count` more tokens, preempting others if needed.

        Return False if the request itself was preempted, or if it must wait for the next step because requests have
        been admitted to this one.
        """
        pool = self.pool
        num_tokens = request.num_computed + count
        while True:
            if pool.counts.num_resident + count <= self.limits.max_kv_tokens:
                updates = self.blocks.grow(request, num_tokens)
                if updates is not None:
                    step.batch.tables += updates
                    return True
            finished = next((other for other in pool.lingering if other.tables), None)
            if finished is not None:  # reclaim finished requests' memory before preempting a running one
                pool.release(finished)
                continue
            if step.batch.admissions:  # their blocks may already be shared: preempt nothing any more
                return False
            victim = self._choose_victim(request)
            self._preempt(victim, step, "memory")
            if victim is request:
                return False

    def _choose_victim(self, request: Request) -> Request:
        """Return the policy's choice among all but the request that arrived first, which always finishes.

        So there is no livelock.
        """
        first = min(self.pool.running, key=lambda other: other.arrival)
        candidates = [other for other in self.pool.running if other is not first]
        if not candidates:
            raise EngineError(
                f"request {request.request_id!r} alone needs more KV memory than there is: "
                f"{self.blocks.pool.num_blocks} blocks of {self.blocks.block_size} tokens"
            )
        return self.policy.victim(candidates)

    def _preempt(self, request: Request, step: ScheduledStep, reason: str) -> None:
        """Free the request's blocks and put it back in the queue; it recomputes later."""
        step.withdraw(request, self.pool.counts)
        self.pool.preempt(request, self._num_steps, self._now)
        step.preempted.append(Preemption(request.request_id, reason))

    # ---- admission ----

    def _num_left(self, request: Request) -> int:
        """Return how many tokens of a waiting request are left to compute after prefix hits."""
        return request.num_tokens - self.blocks.match(request).num_blocks * self.blocks.block_size

    def _admit_ahead(self, prompts: list[Request], step: ScheduledStep, max_tokens: int) -> int:
        """Admit requests, ahead of the running prompts, to the part of the step that the policy reserves for them.

        They leave memory for all tokens of these prompts, so that nothing has to be preempted later. Return how many
        were admitted.
        """
        num_tokens = step.batch.num_tokens
        budget = max_tokens - num_tokens
        num_ahead = self.policy.tokens_ahead(prompts, budget) if budget > 0 else 0
        if num_ahead:
            self._admit(self.policy.candidates_ahead(prompts), step, num_tokens + num_ahead, prompts)
        return len(step.batch.admissions)

    def _admit(
        self,
        candidates: Iterable[Request],
        step: ScheduledStep,
        max_tokens: int,
        prompts: Sequence[Request] = (),
    ) -> str:
        """Admit the candidates that fit while memory for the rest of the running `prompts` is left.

        Return the first reason for which a candidate was not admitted.
        """
        cause = ""
        for request in candidates:
            budget = max_tokens - step.batch.num_tokens
            if budget <= 0:
                return cause or "budget"
            if not self.pool.num_free_rows:
                return cause or "slots"
            if not self.policy.admits(request, self.pool.running):
                return cause or "policy"
            refusal = self._try_admit(request, budget, step, prompts)
            cause = cause or refusal
        return cause or "policy"

    def _try_admit(
        self, request: Request, budget: int, step: ScheduledStep, prompts: Sequence[Request]
    ) -> str:
        """Move a waiting request into the step. Return why it was not admitted, or an empty string."""
        if request.num_in_flight:  # it was preempted while a result is still in flight
            return "memory"
        pool, policy = self.pool, self.policy
        hit = self.blocks.match(request)
        if hit.grows:
            return "step"
        to_admit = max(policy.memory_to_admit(request, pool.running), request.num_tokens)
        is_own = policy.allocates_at_once()  # all these tokens are the request's own, not growth of others
        # Layers with windows hold requests that are longer than what the memory could hold at once: these grow.
        at_once = is_own and self.blocks.layout.blocks_for(to_admit, to_admit) <= self.blocks.pool.num_blocks
        num_own = to_admit if is_own else request.num_tokens
        chunk = to_admit if at_once else self.limits.max_num_batched_tokens
        if not self._has_memory(hit, num_own, chunk, to_admit - num_own, prompts):
            return "memory"
        num_cached = hit.num_blocks * self.blocks.block_size
        count = self._num_granted(request, request.num_tokens - num_cached, budget, step)
        if count <= 0:
            return "policy" if request.splittable else "budget"
        capacity = to_admit if at_once else num_cached + count
        pool.admit(request, hit, capacity, self._now)
        step.batch.admissions.append(Admission(request.row, request.current_spec()))
        step.batch.tables += self.blocks.table_updates(request)
        step.put(request, count, pool.counts)
        self.pool.publish(request)
        if request.record.admitted_at is None:
            request.record.admitted_at = self._now
            request.record.num_cached_tokens = min(request.num_cached, request.num_prompt_tokens)
        policy.on_admit(request)
        return ""

    def _has_memory(
        self, hit: PrefixHit, num_tokens: int, chunk: int, growth: int, prompts: Sequence[Request]
    ) -> bool:
        """Return whether there is memory for a request of `num_tokens`, computed `chunk` tokens at a time, and for
        `growth` of its neighbours, besides `prompts`."""
        blocks, limits = self.blocks, self.limits
        num_left = sum(other.num_tokens - other.num_computed + blocks.block_size for other in prompts)
        if self.pool.counts.num_resident + num_tokens + growth + num_left > limits.max_kv_tokens:
            return False
        num_kept = sum(blocks.blocks_to_finish(other, limits.max_num_batched_tokens) for other in prompts)
        return blocks.fits(hit, num_tokens, chunk, growth, num_kept)

    # ---- results ----

    def update(self, step: ScheduledStep, sampled: Sampled, now: float) -> list[Delta]:
        """Take in the results of a step, and return the deltas."""
        deltas = take_results(self.pool, step, sampled, now)
        self.speculation.settle(step, sampled)
        return deltas

    def drop_cache(self) -> None:
        """Forget all prefixes and answers. Running requests keep their blocks."""
        self.blocks.drop_cache()
        self.speculation.clear()

    def fail(self, step: ScheduledStep, message: str, now: float) -> list[Delta]:
        """Handle a failed step: requests that caused it end with an error, all others restart from their known tokens.

        Until the cause is known, the quarantine decides which requests run. The state of KV memory after the failure is
        unknown, so none of it is reused. No step may be in flight.
        """
        self._now = now
        self.pool.attribution.step_failed(now)
        failed_entries = self._quarantine.entries_to_fail(step)
        failure = RequestFailure("step_failed", message)
        deltas = end_with_errors(self.pool, step, dict.fromkeys(failed_entries, failure), now)
        pool = self.pool
        for request in pool.requests.values():
            pool.counts.fail(request)
        emptied = ScheduledStep(step.batch)  # nothing is withdrawn from the failed step
        for request in pool.running[:]:
            self._preempt(request, emptied, "failure")
        step.preempted += emptied.preempted
        pool.policy = self._quarantine
        deltas += pool.retire(now)
        self.blocks.drop_cache()
        return deltas

    def _lift_quarantine(self) -> None:
        self.pool.policy = self._quarantine.policy
