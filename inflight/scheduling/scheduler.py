"""Who runs in the next step, how many tokens each, in which blocks. Mechanism only: choices are the policy's.

There are no phases. A request has `num_tokens` and `num_computed`; every step lets computed catch up with
total, and where it has caught up the step samples one more. Requests one token behind (decodes) are served
first, those further behind (prompts, resumed requests) share what is left of the step, then the queue is asked. A
policy may reserve a part of the step for waiting requests, which are then admitted ahead of running prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from inflight.errors import EngineError, RequestError
from inflight.events import Delta, Preemption, RequestFailure
from inflight.kv import BlockManager
from inflight.request import Request, Status
from inflight.scheduling.batch import Admission, Batch, Sampled, TableUpdate
from inflight.scheduling.checked_policy import CheckedPolicy
from inflight.scheduling.policy import Policy, answer
from inflight.scheduling.quarantine import Quarantine
from inflight.scheduling.request_pool import Limits, RequestPool
from inflight.scheduling.results import end_with_errors, take_results
from inflight.scheduling.step import ScheduledStep
from inflight.scheduling.token_budget import TokenBudget


class Scheduler:
    """Forms steps out of the requests in its pool, and takes in what they brought."""

    def __init__(
        self, limits: Limits, policy: Policy, blocks: BlockManager, token_budget: TokenBudget | None = None
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.token_budget = token_budget or TokenBudget(limits.max_num_batched_tokens)
        self._checked = CheckedPolicy(policy)
        self._checked.set_num_left(self._num_left)
        self._quarantine = Quarantine(self._checked, self._lift_quarantine)
        self.pool = RequestPool(limits, self._checked, blocks)
        self._num_steps = 0
        self._now = 0.0  # as it was last told
        self._preempted: list[Preemption] = []  # since the last step that was launched

    @property
    def policy(self) -> Policy:
        """Who decides now: the engine's policy, checked, or the quarantine."""
        return self.pool.policy

    def add(self, request: Request) -> None:
        limit = self.limits.max_num_batched_tokens
        if not request.splittable and request.num_to_compute > limit:
            raise RequestError(
                f"request {request.request_id!r} cannot be split and comes to {request.num_to_compute} tokens: "
                f"a step has at most {limit} (max_num_batched_tokens)"
            )
        if request.max_tokens and request.num_tokens >= request.max_total:
            raise RequestError(
                f"request {request.request_id!r} has all of its {request.max_tokens} outputs already"
            )
        room = min(self.blocks.pool.num_blocks * self.blocks.block_size, self.limits.max_kv_tokens)
        if request.num_to_compute > room:  # a step in which it is alone would find no memory for it
            raise RequestError(
                f"request {request.request_id!r} may come to {request.num_to_compute} tokens: this engine has KV "
                f"memory for {room}"
            )
        self.pool.add(request, self._num_steps)

    # ---- one step ----

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed before a step in flight comes back."""
        self._now = now
        step = self._form()
        if not step.requests and not step.preempted and self._nothing_to_wait_for():
            with self._checked.overruled():
                step = self._form()
        self._preempted += step.preempted
        if not step.requests:
            return None
        step.preempted, self._preempted = self._preempted, []
        self._num_steps += 1
        step.kv = self.pool.usage()
        self.policy.on_batch(step)
        return step

    def _nothing_to_wait_for(self) -> bool:
        """There are requests, and no result to come that could change what the policy answers."""
        pool = self.pool
        return pool.has_work and not any(request.num_in_flight for request in pool.requests.values())

    def _form(self) -> ScheduledStep:
        step = ScheduledStep(Batch(self._num_steps))
        someone_waits = len(self.policy) > 0
        cause = "step"  # of waiting until the next step is formed, for whoever comes meanwhile
        if someone_waits:
            for request in self.policy.yields(self.pool.running):
                self._preempt(request, step, "policy")
        behind = self._schedule_decodes(step)
        max_tokens = self.token_budget.limit(len(step), len(behind) + len(self.policy))
        num_decodes, num_ahead = len(step), 0
        if someone_waits and not step.preempted and self.pool.num_free_rows:
            num_ahead = self._admit_ahead(behind, step, max_tokens)
        if behind:
            for request in self.policy.prompts(behind):
                if request.status is Status.RUNNING:  # an older one may have preempted it meanwhile
                    self._schedule_chunk(request, step, max_tokens)
            for request in behind:
                self.pool.publish(request)
            step.move_to_end(num_decodes, num_ahead)
        if someone_waits:
            cause = "memory" if step.preempted else self._admit(self.policy.candidates(), step, max_tokens)
        self.pool.attribution.blame(cause if len(self.policy) else "step", self._now)
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> list[Request]:
        """Give every request that is one token behind its token. Returns those further behind."""
        behind = []
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
                # The last output is in flight and needs no KV; the last token of a request without any needs its own.
                if start < request.num_to_compute:
                    behind.append(request)
                continue
            full = start == request.num_places or counts.num_resident >= max_resident
            if full and not self._make_room(request, 1, step):
                continue
            requests.append(request)
            rows.append(request.row)
            starts.append(start)
            batch.counts.append(1)
            batch.samples.append(True)
            counts.decode(request)
        batch.num_tokens = len(requests)
        return behind

    def _ready(self) -> list[Request]:
        """The running requests that this step may have tokens of: a copy, since they may be preempted on the way.

        With stages, a token that is in flight is not there yet when the first stage would need it. So its request waits
        for it, and others decode meanwhile: every step takes its share of them.
        """
        running, num_stages = self.pool.running, self.limits.num_stages
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
        """Give a running request that is several tokens behind what the step can spare."""
        wanted = request.num_tokens - request.num_computed
        budget = max_tokens - step.batch.num_tokens
        if wanted <= 0 or budget <= 0:
            return
        count = self._share(request, wanted, budget, step)
        if count > 0 and self._make_room(request, count, step):
            step.put(request, count, self.pool.counts)

    def _share(self, request: Request, wanted: int, budget: int, step: ScheduledStep) -> int:
        """How many of the tokens it wants a request gets. One that cannot be split gets all of them or none, for which
        it may go beyond the step's budget, up to the limit: a policy that gives it some gives it all."""
        if request.splittable:
            return self.policy.tokens(request, min(wanted, request.max_chunk), budget)
        limit = self.limits.max_num_batched_tokens - step.batch.num_tokens
        return wanted if wanted <= limit and self.policy.tokens(request, wanted, limit) > 0 else 0

    # ---- memory ----

    def _make_room(self, request: Request, count: int, step: ScheduledStep) -> bool:
        """Blocks for `count` more tokens, preempting others where needed. False if the request itself must yield, or if
        requests have been admitted to this step: then it has to wait for the next."""
        pool = self.pool
        num_tokens = request.num_computed + count
        while True:
            if pool.counts.num_resident + count <= self.limits.max_kv_tokens:
                first = len(request.block_ids)
                new_ids = self.blocks.grow(request, num_tokens)
                if new_ids is not None:
                    if new_ids:
                        step.batch.tables.append(TableUpdate(request.row, first, new_ids))
                    return True
            finished = next((other for other in pool.lingering if other.block_ids), None)
            if finished is not None:  # its place may be kept, its memory is not worth a preemption
                pool.release(finished)
                continue
            if step.batch.admissions:  # their blocks may be shared already: nobody is preempted any more
                return False
            victim = self._choose_victim(request)
            self._preempt(victim, step, "memory")
            if victim is request:
                return False

    def _choose_victim(self, request: Request) -> Request:
        """The policy's choice among all but the oldest: so the oldest always finishes, and there is no livelock."""
        oldest = min(self.pool.running, key=lambda other: other.arrival)
        candidates = [other for other in self.pool.running if other is not oldest]
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
        """How many tokens of a waiting request are left to compute after prefix hits."""
        return request.num_tokens - len(self.blocks.match(request)) * self.blocks.block_size

    def _admit_ahead(self, prompts: list[Request], step: ScheduledStep, max_tokens: int) -> int:
        """Admit requests to the part of the step that the policy reserves for them, ahead of the running prompts.
        They leave these prompts memory for all their tokens, so that nobody has to be preempted for it. Returns how
        many were admitted."""
        num_tokens = step.batch.num_tokens
        reserved = self.policy.reserved(prompts, max_tokens - num_tokens) if max_tokens > num_tokens else 0
        if reserved:
            num_left = sum(request.num_tokens - request.num_computed for request in prompts)
            num_kept = num_left + self.blocks.block_size * len(prompts)  # each may begin another block
            self._admit(self.policy.ahead(prompts), step, num_tokens + reserved, num_kept)
        return len(step.batch.admissions)

    def _admit(
        self, candidates: Iterator[Request], step: ScheduledStep, max_tokens: int, num_kept: int = 0
    ) -> str:
        """Admit the candidates that fit and leave memory for `num_kept` tokens of others. Returns the first reason that
        was met for not admitting one."""
        request, cause = next(candidates, None), ""
        while request is not None:
            budget = max_tokens - step.batch.num_tokens
            if budget <= 0:
                return cause or "budget"
            if not self.pool.num_free_rows:
                return cause or "slots"
            if not self.policy.admits(request, self.pool.running):
                return cause or "policy"
            refusal = self._try_admit(request, budget, step, num_kept)
            cause = cause or refusal
            request = answer(candidates, not refusal)
        return cause or "policy"

    def _try_admit(self, request: Request, budget: int, step: ScheduledStep, num_kept: int) -> str:
        """Move a waiting request into the step. Why not, if it is not."""
        if request.num_in_flight:  # preempted a moment ago, its last result is still to come
            return "memory"
        pool, policy = self.pool, self.policy
        hits = self.blocks.match(request)
        reserved = max(policy.reserve(request, pool.running), request.num_tokens)
        needed = reserved + num_kept
        if pool.counts.num_resident + needed > self.limits.max_kv_tokens or not self.blocks.fits(
            hits, needed
        ):
            return "memory"
        num_cached = len(hits) * self.blocks.block_size
        count = self._share(request, request.num_tokens - num_cached, budget, step)
        if count <= 0:
            return "policy" if request.splittable else "budget"
        places = reserved if policy.reserves_ahead() else num_cached + count
        pool.admit(request, hits, places, self._now)
        step.batch.admissions.append(Admission(request.row, request.current_spec()))
        step.batch.tables.append(TableUpdate(request.row, 0, list(request.block_ids)))
        step.put(request, count, pool.counts)
        self.pool.publish(request)
        if request.record.admitted_at is None:
            request.record.admitted_at = self._now
            request.record.num_cached_tokens = min(request.num_cached, request.num_prompt_tokens)
        policy.on_admit(request)
        return ""

    # ---- results ----

    def update(self, step: ScheduledStep, sampled: Sampled, now: float) -> list[Delta]:
        """Append the sampled tokens, finish and free what is done, and tell the news."""
        return take_results(self.pool, step, sampled, now)

    def fail(self, step: ScheduledStep, message: str, now: float) -> list[Delta]:
        """A step went wrong: those to blame end with an error, all others start over from their known tokens.

        Until it is known who is to blame, the quarantine decides who runs. What the step left in memory is unknown,
        so nothing of it is kept. No step may be in flight.
        """
        self._now = now
        self.pool.attribution.step_failed(now)
        guilty = self._quarantine.judge(step)
        failure = RequestFailure("step_failed", message)
        deltas = end_with_errors(self.pool, step, dict.fromkeys(guilty, failure), now)
        pool = self.pool
        for request in pool.requests.values():
            pool.counts.fail(request)
        emptied = ScheduledStep(step.batch)  # there is no part in the failed one to take back
        for request in pool.running[:]:
            self._preempt(request, emptied, "failure")
        step.preempted += emptied.preempted
        pool.policy = self._quarantine
        deltas += pool.retire(now)
        self.blocks.drop_cache()
        return deltas

    def _lift_quarantine(self) -> None:
        self.pool.policy = self._quarantine.policy
