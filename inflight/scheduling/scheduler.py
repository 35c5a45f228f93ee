"""Who runs in the next step, how many tokens each, in which blocks. Mechanism only: choices are the policy's.

There are no phases. A request has `num_tokens` and `num_computed`; every step lets computed catch up with
total, and where it has caught up the step samples one more. Requests one token behind (decodes) are served
first, those further behind (prompts, resumed requests) share what is left of the step, then the queue is asked.
"""

from __future__ import annotations

from inflight.errors import EngineError
from inflight.events import Delta, RequestFailure
from inflight.kv import BlockManager
from inflight.request import Request, Status
from inflight.scheduling.batch import Admission, Batch, Sampled, TableUpdate
from inflight.scheduling.checked_policy import CheckedPolicy
from inflight.scheduling.policy import Policy, answer
from inflight.scheduling.quarantine import Quarantine
from inflight.scheduling.roster import Limits, Roster
from inflight.scheduling.token_budget import TokenBudget


class Scheduler(Roster):
    """A roster that knows what to compute next."""

    def __init__(
        self, limits: Limits, policy: Policy, blocks: BlockManager, token_budget: TokenBudget | None = None
    ) -> None:
        self._checked = CheckedPolicy(policy)
        super().__init__(limits, self._checked, blocks)
        self.token_budget = token_budget or TokenBudget(limits.max_num_batched_tokens)
        self._quarantine = Quarantine(self._checked, self._lift_quarantine)

    # ---- one step ----

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when nothing can be computed before a batch in flight comes back."""
        batch = self._form(now)
        if not batch.requests and not batch.preempted and self._nothing_to_wait_for():
            with self._checked.overruled():
                batch = self._form(now)
        if not batch.requests:
            return None
        self._num_steps += 1
        batch.kv = self.usage()
        self.policy.on_batch(batch)
        return batch

    def _nothing_to_wait_for(self) -> bool:
        """There are requests, and no result to come that could change what the policy answers."""
        return self.has_work and not any(request.num_in_flight for request in self.requests.values())

    def _form(self, now: float) -> Batch:
        batch = Batch(self._num_steps)
        someone_waits = len(self.policy) > 0
        if someone_waits:
            for request in self.policy.yields(self.running):
                self._preempt(request, batch)
        behind = self._schedule_decodes(batch)
        max_tokens = self.token_budget.limit(len(batch), len(behind) + len(self.policy))
        for request in behind:
            if request.status is Status.RUNNING:  # an older one may have preempted it meanwhile
                self._schedule_chunk(request, batch, max_tokens)
        for request in behind:
            self._publish(request)
        if someone_waits and not batch.preempted:
            self._admit(batch, now, max_tokens)
        return batch

    def _schedule_decodes(self, batch: Batch) -> list[Request]:
        """Give every request that is one token behind its token. Returns those further behind."""
        behind = []
        max_resident = self.limits.max_kv_tokens
        running = Status.RUNNING
        for request in self.running[:]:  # a copy, since a request may be preempted on the way
            start = request.num_computed
            num_tokens = request.num_tokens
            if start + 1 != num_tokens:
                behind.append(request)
                continue
            # At max_total the last token is in flight and needs no KV: nothing to do but wait for it.
            if num_tokens >= request.max_total or request.status is not running:
                continue
            full = start == request.num_places or self.num_resident >= max_resident
            if full and not self._make_room(request, 1, batch):
                continue
            batch.requests.append(request)
            batch.rows.append(request.row)
            batch.starts.append(start)
            batch.counts.append(1)
            batch.samples.append(True)
            request.num_computed = num_tokens
            request.num_tokens = num_tokens + 1
            request.num_in_flight += 1
            self.num_resident += 1
        batch.num_tokens = len(batch.requests)
        return behind

    def _schedule_chunk(self, request: Request, batch: Batch, max_tokens: int) -> None:
        """Give a running request that is several tokens behind what the step can spare."""
        wanted = request.num_tokens - request.num_computed
        budget = max_tokens - batch.num_tokens
        if wanted <= 0 or budget <= 0:
            return
        count = self.policy.tokens(request, wanted, budget)
        if count > 0 and self._make_room(request, count, batch):
            self._put(request, count, batch)

    def _put(self, request: Request, count: int, batch: Batch) -> None:
        """Enter tokens [num_computed, num_computed + count) of the request into the batch."""
        start = request.num_computed
        samples = start + count == request.num_tokens and request.num_tokens < request.max_total
        batch.requests.append(request)
        batch.rows.append(request.row)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.samples.append(samples)
        batch.num_tokens += count
        request.num_computed = start + count
        self.num_resident += count
        if samples:
            request.num_tokens += 1
            request.num_in_flight += 1

    def _publish(self, request: Request) -> None:
        """Let others share the request's full blocks, even in the step that fills them: a step writes all its KV
        before it reads any. Only once no preemption can take that step back."""
        self.blocks.publish(request, min(request.num_computed, len(request.token_ids)))

    # ---- memory ----

    def _make_room(self, request: Request, count: int, batch: Batch) -> bool:
        """Blocks for `count` more tokens, preempting others where needed. False if the request itself must yield."""
        num_tokens = request.num_computed + count
        while True:
            if self.num_resident + count <= self.limits.max_kv_tokens:
                first = len(request.block_ids)
                new_ids = self.blocks.grow(request, num_tokens)
                if new_ids is not None:
                    if new_ids:
                        batch.tables.append(TableUpdate(request.row, first, new_ids))
                    return True
            finished = next((other for other in self.lingering if other.block_ids), None)
            if finished is not None:  # its place may be kept, its memory is not worth a preemption
                self._release(finished)
                continue
            victim = self._choose_victim(request)
            self._preempt(victim, batch)
            if victim is request:
                return False

    def _choose_victim(self, request: Request) -> Request:
        """The policy's choice among all but the oldest: so the oldest always finishes, and there is no livelock."""
        oldest = min(self.running, key=lambda other: other.arrival)
        candidates = [other for other in self.running if other is not oldest]
        if not candidates:
            raise EngineError(
                f"request {request.request_id!r} alone needs more KV memory than there is: "
                f"{self.blocks.pool.num_blocks} blocks of {self.blocks.block_size} tokens"
            )
        return self.policy.victim(candidates)

    def _preempt(self, request: Request, batch: Batch) -> None:
        """Free the request's blocks and put it back in the queue; it recomputes later."""
        self._withdraw(request, batch)
        self.running.remove(request)
        self._leave(request)
        request.status = Status.WAITING
        request.record.num_preemptions += 1
        batch.preempted.append(request)
        self.policy.push(request, self._num_steps)

    def _withdraw(self, request: Request, batch: Batch) -> None:
        """Take back the request's part in the batch being formed, if it has one."""
        if request not in batch.requests:
            return
        index = batch.requests.index(request)
        del batch.requests[index], batch.rows[index], batch.starts[index]
        batch.num_tokens -= batch.counts.pop(index)
        if batch.samples.pop(index):
            request.num_in_flight -= 1
            request.num_tokens -= 1

    # ---- admission ----

    def _admit(self, batch: Batch, now: float, max_tokens: int) -> None:
        candidates = self.policy.candidates()
        request = next(candidates, None)
        while request is not None:
            budget = max_tokens - batch.num_tokens
            if budget <= 0 or not self._free_rows or not self.policy.admits(request, self.running):
                return
            request = answer(candidates, self._try_admit(request, budget, batch, now))

    def _try_admit(self, request: Request, budget: int, batch: Batch, now: float) -> bool:
        """Move a waiting request into the batch if memory allows."""
        if request.num_in_flight:  # preempted a moment ago, its last token is still to come
            return False
        hits = self.blocks.match(request)
        reserved = max(self.policy.reserve(request, self.running), request.num_tokens)
        if self.num_resident + reserved > self.limits.max_kv_tokens or not self.blocks.fits(hits, reserved):
            return False
        wanted = request.num_tokens - len(hits) * self.blocks.block_size
        count = self.policy.tokens(request, wanted, budget)
        if count <= 0:
            return False
        self.policy.remove(request)
        self.blocks.attach(request, hits)
        self.num_resident += request.num_computed
        self.blocks.grow(request, reserved if self.policy.reserves_ahead() else request.num_computed + count)
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        self.running.append(request)
        batch.admissions.append(Admission(request.row, request))
        batch.tables.append(TableUpdate(request.row, 0, list(request.block_ids)))
        self._put(request, count, batch)
        self._publish(request)
        if request.record.admitted_at is None:
            request.record.admitted_at = now
            request.record.num_cached_tokens = min(request.num_cached, request.num_prompt_tokens)
        self.policy.on_admit(request)
        return True

    # ---- results ----

    def update(self, batch: Batch, sampled: Sampled, now: float) -> list[Delta]:
        """Append the sampled tokens, finish and free what is done, and tell the news."""
        deltas = self._end_with_errors(batch, sampled.errors, now) if sampled.errors else []
        ended: list[tuple[Request, Delta]] = []
        if sampled.prompt_logprobs:
            self._keep_prompt_logprobs(batch, sampled)
        for index, (request, token_id) in enumerate(zip(batch.requests, sampled.token_ids, strict=True)):
            if not batch.samples[index]:
                continue
            request.num_in_flight -= 1
            status = request.status
            if status is Status.FINISHED or status is Status.LINGERING:
                continue  # it ended while this step was in flight: the surplus token is dropped
            delta = Delta(request.request_id, [token_id])
            deltas.append(delta)
            known = request.token_ids
            known.append(token_id)
            record = request.record
            record.last_token_at = now
            if record.first_token_at is None:
                record.first_token_at = now
                delta.prompt_logprobs = request.prompt_logprobs or None
            if sampled.logprobs and index in sampled.logprobs:
                delta.logprobs = [sampled.logprobs[index]]
            num_known = len(known)
            if (
                token_id in request.stop_ids
                and num_known > request.num_prompt_tokens + request.params.min_tokens
            ):
                record.finish_reason, record.stop_token_id = "stop", token_id
                ended.append((request, delta))
            elif num_known >= request.max_total:
                record.finish_reason = "length"
                ended.append((request, delta))
            elif request.num_computed >= (request.num_published + 1) * self.blocks.block_size:
                self._publish(request)
        if ended:
            self._finish(ended, now)
            deltas += self._retire(now)
        return deltas

    def _keep_prompt_logprobs(self, batch: Batch, sampled: Sampled) -> None:
        for index, positions in sampled.prompt_logprobs.items():
            request = batch.requests[index]
            kept = request.prompt_logprobs or [None]  # nothing predicts the first token
            first = batch.starts[index] + 1
            if len(kept) >= first:  # else it was preempted meanwhile; computed anew, it says the same
                kept[first : first + len(positions)] = positions
                request.prompt_logprobs = kept

    def _end_with_errors(self, batch: Batch, errors: dict[int, RequestFailure], now: float) -> list[Delta]:
        deltas: list[Delta] = []
        for index, failure in errors.items():
            request = batch.requests[index]
            if request.status not in (Status.FINISHED, Status.LINGERING):  # else it has all its tokens
                request.record.finish_reason = "error"
                deltas += self.abort(request, now)[1]
                deltas[-1].error, deltas[-1].error_code = failure.message, failure.code
        return deltas

    def fail(self, batch: Batch, message: str, now: float) -> list[Delta]:
        """A step went wrong: those to blame end with an error, all others start over from their known tokens.

        Until it is known who is to blame, the quarantine decides who runs. What the step left in memory is unknown,
        so nothing of it is kept. No step may be in flight.
        """
        guilty = self._quarantine.judge(batch)
        deltas = self._end_with_errors(
            batch, dict.fromkeys(guilty, RequestFailure("step_failed", message)), now
        )
        for request in self.requests.values():
            request.num_in_flight = 0
            request.num_tokens = len(request.token_ids)
        emptied = Batch(batch.step)  # there is no part in the failed one to take back
        for request in self.running[:]:
            self._preempt(request, emptied)
        self.policy = self._quarantine
        deltas += self._retire(now)
        self.blocks.drop_cache()
        return deltas

    def _lift_quarantine(self) -> None:
        self.policy = self._quarantine.policy
