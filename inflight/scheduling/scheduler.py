"""Who runs in the next step, how many tokens each, in which blocks. Mechanism only: choices are the policy's.

There are no phases. A request has `num_tokens` and `num_computed`; every step lets computed catch up with
total, and where it has caught up the step samples one more. Requests one token behind (decodes) are served
first, those further behind (prompts, resumed requests) share what is left of the step, then the queue is asked.
"""

from __future__ import annotations

from inflight.errors import EngineError, RequestError
from inflight.events import Delta, Preemption, RequestFailure
from inflight.kv import BlockManager
from inflight.request import Request, Status
from inflight.scheduling.batch import Admission, Batch, RowRequest, Sampled, TableUpdate
from inflight.scheduling.checked_policy import CheckedPolicy
from inflight.scheduling.kinds import KINDS, tokens_to_end
from inflight.scheduling.policy import Policy, answer
from inflight.scheduling.quarantine import Quarantine
from inflight.scheduling.request_pool import Limits, RequestPool
from inflight.scheduling.step import ScheduledStep
from inflight.scheduling.token_budget import TokenBudget

NO_TOKEN = RequestFailure("step_failed", "the step gave it no token")


class Scheduler:
    """Forms steps out of the requests in its pool, and takes in what they brought."""

    def __init__(
        self, limits: Limits, policy: Policy, blocks: BlockManager, token_budget: TokenBudget | None = None
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.token_budget = token_budget or TokenBudget(limits.max_num_batched_tokens)
        self._checked = CheckedPolicy(policy)
        self._quarantine = Quarantine(self._checked, self._lift_quarantine)
        self.pool = RequestPool(limits, self._checked, blocks)
        self._num_steps = 0
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
        self.pool.add(request, self._num_steps)

    # ---- one step ----

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed before a step in flight comes back."""
        step = self._form(now)
        if not step.requests and not step.preempted and self._nothing_to_wait_for():
            with self._checked.overruled():
                step = self._form(now)
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

    def _form(self, now: float) -> ScheduledStep:
        step = ScheduledStep(Batch(self._num_steps))
        someone_waits = len(self.policy) > 0
        if someone_waits:
            for request in self.policy.yields(self.pool.running):
                self._preempt(request, step, "policy")
        behind = self._schedule_decodes(step)
        max_tokens = self.token_budget.limit(len(step), len(behind) + len(self.policy))
        for request in behind:
            if request.status is Status.RUNNING:  # an older one may have preempted it meanwhile
                self._schedule_chunk(request, step, max_tokens)
        for request in behind:
            self._publish(request)
        if someone_waits and not step.preempted:
            self._admit(step, now, max_tokens)
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> list[Request]:
        """Give every request that is one token behind its token. Returns those further behind."""
        behind = []
        batch, requests, pool = step.batch, step.requests, self.pool
        rows, starts = batch.rows, batch.starts
        max_resident = self.limits.max_kv_tokens
        running = Status.RUNNING
        for request in pool.running[:]:  # a copy, since a request may be preempted on the way
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
            full = start == request.num_places or pool.num_resident >= max_resident
            if full and not self._make_room(request, 1, step):
                continue
            requests.append(request)
            rows.append(request.row)
            starts.append(start)
            batch.counts.append(1)
            batch.samples.append(True)
            request.num_computed = num_tokens
            request.num_tokens = num_tokens + 1
            request.num_in_flight += 1
            pool.num_resident += 1
        batch.num_tokens = len(requests)
        return behind

    def _schedule_chunk(self, request: Request, step: ScheduledStep, max_tokens: int) -> None:
        """Give a running request that is several tokens behind what the step can spare."""
        wanted = request.num_tokens - request.num_computed
        budget = max_tokens - step.batch.num_tokens
        if wanted <= 0 or budget <= 0:
            return
        count = self._share(request, wanted, budget, step)
        if count > 0 and self._make_room(request, count, step):
            step.put(request, count)
            self.pool.num_resident += count

    def _share(self, request: Request, wanted: int, budget: int, step: ScheduledStep) -> int:
        """How many of the tokens it wants a request gets. One that cannot be split gets all of them or none, for which
        it may go beyond the step's budget, up to the limit: a policy that gives it some gives it all."""
        if request.splittable:
            return self.policy.tokens(request, min(wanted, request.max_chunk), budget)
        limit = self.limits.max_num_batched_tokens - step.batch.num_tokens
        return wanted if wanted <= limit and self.policy.tokens(request, wanted, limit) > 0 else 0

    def _publish(self, request: Request) -> None:
        """Let others share the request's full blocks, even in the step that fills them: a step writes all its KV
        before it reads any. Only once no preemption can take that step back."""
        self.blocks.publish(request, min(request.num_computed, len(request.token_ids)))

    # ---- memory ----

    def _make_room(self, request: Request, count: int, step: ScheduledStep) -> bool:
        """Blocks for `count` more tokens, preempting others where needed. False if the request itself must yield."""
        pool = self.pool
        num_tokens = request.num_computed + count
        while True:
            if pool.num_resident + count <= self.limits.max_kv_tokens:
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
        step.withdraw(request)
        self.pool.preempt(request, self._num_steps)
        step.preempted.append(Preemption(request.request_id, reason))

    # ---- admission ----

    def _admit(self, step: ScheduledStep, now: float, max_tokens: int) -> None:
        candidates = self.policy.candidates()
        request = next(candidates, None)
        while request is not None:
            budget = max_tokens - step.batch.num_tokens
            if budget <= 0 or not self.pool.has_free_row:
                return
            if not self.policy.admits(request, self.pool.running):
                return
            request = answer(candidates, self._try_admit(request, budget, step, now))

    def _try_admit(self, request: Request, budget: int, step: ScheduledStep, now: float) -> bool:
        """Move a waiting request into the step if memory allows."""
        if request.num_in_flight:  # preempted a moment ago, its last result is still to come
            return False
        pool, policy = self.pool, self.policy
        hits = self.blocks.match(request)
        reserved = max(policy.reserve(request, pool.running), request.num_tokens)
        if pool.num_resident + reserved > self.limits.max_kv_tokens or not self.blocks.fits(hits, reserved):
            return False
        num_cached = len(hits) * self.blocks.block_size
        count = self._share(request, request.num_tokens - num_cached, budget, step)
        if count <= 0:
            return False
        pool.admit(request, hits, reserved if policy.reserves_ahead() else num_cached + count)
        step.batch.admissions.append(Admission(request.row, RowRequest.of(request)))
        step.batch.tables.append(TableUpdate(request.row, 0, list(request.block_ids)))
        step.put(request, count)
        pool.num_resident += count
        self._publish(request)
        if request.record.admitted_at is None:
            request.record.admitted_at = now
            request.record.num_cached_tokens = min(request.num_cached, request.num_prompt_tokens)
        policy.on_admit(request)
        return True

    # ---- results ----

    def update(self, step: ScheduledStep, sampled: Sampled, now: float) -> list[Delta]:
        """Append the sampled tokens, finish and free what is done, and tell the news."""
        deltas = self._end_with_errors(step, sampled.errors, now) if sampled.errors else []
        ended: list[tuple[Request, Delta]] = []
        if sampled.prompt_logprobs:
            self._keep_prompt_logprobs(step, sampled)
        samples = step.batch.samples
        for index, (request, token_ids) in enumerate(zip(step.requests, sampled.token_ids, strict=True)):
            if not samples[index]:
                continue
            request.num_in_flight -= 1
            status = request.status
            if status is Status.FINISHED or status is Status.LINGERING:
                continue  # it ended while this step was in flight: the surplus token is dropped
            if len(token_ids) != 1:
                if not token_ids:
                    deltas += self._end_with_errors(step, {index: NO_TOKEN}, now)
                    continue
                token_ids = tokens_to_end(request, token_ids)
                request.num_tokens += len(token_ids) - 1
            delta = Delta(request.request_id, token_ids)
            deltas.append(delta)
            known = request.token_ids
            known += token_ids
            record = request.record
            record.last_token_at = now
            if record.first_token_at is None:
                record.first_token_at = now
                delta.prompt_logprobs = request.prompt_logprobs or None
            if sampled.logprobs and index in sampled.logprobs:
                delta.logprobs = sampled.logprobs[index][: len(token_ids)]
            may_end = token_ids[-1] in request.stop_ids or len(known) >= request.max_total
            if may_end and KINDS[request.kind].ends(request, delta, sampled, index):
                ended.append((request, delta))
            elif request.num_computed >= (request.num_published + 1) * self.blocks.block_size:
                self._publish(request)
        for request in step.completed:
            request.num_in_flight -= 1
            if request.status in (Status.WAITING, Status.RUNNING):
                deltas.append(delta := Delta(request.request_id, []))
                if KINDS[request.kind].ends(request, delta, sampled, step.requests.index(request)):
                    ended.append((request, delta))
        if ended:
            self.pool.finish(ended, now)
            deltas += self.pool.retire(now)
        return deltas

    def _keep_prompt_logprobs(self, step: ScheduledStep, sampled: Sampled) -> None:
        for index, positions in sampled.prompt_logprobs.items():
            request = step.requests[index]
            kept = request.prompt_logprobs or [None]  # nothing predicts the first token
            first = step.batch.starts[index] + 1
            if len(kept) >= first:  # else it was preempted meanwhile; computed anew, it says the same
                kept[first : first + len(positions)] = positions
                request.prompt_logprobs = kept

    def _end_with_errors(
        self, step: ScheduledStep, errors: dict[int, RequestFailure], now: float
    ) -> list[Delta]:
        deltas: list[Delta] = []
        for index, failure in errors.items():
            request = step.requests[index]
            if request.status not in (Status.FINISHED, Status.LINGERING):  # else it has all its tokens
                request.record.finish_reason = "error"
                deltas += self.pool.abort(request, now)[1]
                deltas[-1].error, deltas[-1].error_code = failure.message, failure.code
        return deltas

    def fail(self, step: ScheduledStep, message: str, now: float) -> list[Delta]:
        """A step went wrong: those to blame end with an error, all others start over from their known tokens.

        Until it is known who is to blame, the quarantine decides who runs. What the step left in memory is unknown,
        so nothing of it is kept. No step may be in flight.
        """
        guilty = self._quarantine.judge(step)
        failure = RequestFailure("step_failed", message)
        deltas = self._end_with_errors(step, dict.fromkeys(guilty, failure), now)
        pool = self.pool
        for request in pool.requests.values():
            request.num_in_flight = 0
            request.num_tokens = len(request.token_ids)
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
