"""A state machine over the whole engine with the fake runner.

Whatever arrives, is aborted or fails, under every policy (sane or not), depth, chunk size and memory: limits hold at
every step, everyone finishes, and the tokens are those that the request would get alone. A step that fails once and
leaves its memory in ruins ends a request only if that was alone in it, or has seen too many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.errors import RequestError
from inflight.kv.layout import KVLayout
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Batch
from inflight.scheduling.policy import Policy
from inflight.scheduling.quarantine import MAX_FAILURES
from inflight.scheduling.scheduler import Speculation
from tests.e2e.breaking import PoisonedRunner
from tests.scheduling.guessing import EagerModel, guessing
from tests.scheduling.hostile import HOSTILE
from tests.scheduling.policies import POLICIES
from tests.scheduling.staged import StagedRunner
from tests.scheduling.trouble import ruin_memory
from tests.support.fake_runner import FakeRunner, expected_scores, expected_tokens
from tests.support.requests import FakeEngine, make_request
from tests.support.seen import SeenBatch


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


MAX_LEN = 24  # prompt and outputs of one request

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 2), min_size=1, max_size=12),
        "max_tokens": st.sampled_from([0, *range(1, 13)]),  # 0: its prompt is scored
        "num_outputs": st.sampled_from(
            [0, 0, 0, 1, 4]
        ),  # outputs that it comes with, resumed from another engine
        "scored": st.booleans(),
        "splittable": st.sampled_from([True, True, False]),
        "priority": st.integers(-2, 2),
        "tenant": st.sampled_from("abc"),
        "cache_salt": st.sampled_from(["", "s"]),
        "stop_ids": st.frozensets(st.integers(0, 49), max_size=6),
    }
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from((*POLICIES, *HOSTILE)),
        depth=st.sampled_from([1, 2]),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.sampled_from([1, 3, 6]),
        max_num_batched_tokens=st.sampled_from([1, 3, 7, 12, 40]),
        spare_blocks=st.sampled_from([0, 1, 4, 100]),
        spare_kv_tokens=st.sampled_from([0, 5, 30, 1000]),
        caching=st.booleans(),
        method=st.sampled_from(["launch", "collect"]),
        odds=st.sampled_from([None, None, 0.0, 0.6, 1.0, "model"]),
        staged=st.sampled_from([False, False, True]),
        windows=st.sampled_from([(None,), (None,), (None, 5, 5), (3, 8), (None, 2, 6)]),
        snapshot_blocks=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self,
        policy: str | Callable[[], Policy],
        depth: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        spare_blocks: int,
        spare_kv_tokens: int,
        caching: bool,
        method: str,
        odds: float | Literal["model"] | None,
        staged: bool,
        windows: tuple[int | None, ...],
        snapshot_blocks: int,
    ) -> None:
        self.layout = KVLayout(block_size, windows, snapshot_blocks)
        speculation: Speculation | None = None
        if odds is not None and not staged:
            model = EagerModel(3, random=Random(0))
            speculation = model if odds == "model" else guessing(odds, self.layout)
        # Just enough for one request, and a little more: preemption is the rule here, not the exception.
        self.engine = FakeEngine(
            policy=policy,
            num_blocks=self.layout.blocks_for(MAX_LEN, max_num_batched_tokens) + spare_blocks,
            windows=windows,
            snapshot_blocks=snapshot_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_kv_tokens=MAX_LEN + spare_kv_tokens,
            pipeline_depth=depth,
            num_stages=depth if staged else 1,
            caching=caching,
            make_runner=StagedRunner if staged else FakeRunner,
            speculation=speculation,
        )
        self.prompts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.num_outputs: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.ordered = False  # the next step is to fail
        self.batches: list[Batch] = []  # since the last check
        self.num_preemptions_recorded = 0
        self.num_failed_with: dict[str, int] = {}
        self.alone: set[str] = set()  # who was alone in a step that failed
        PoisonedRunner(self.engine.core, self._fails, method)

    def _fails(self, batch: SeenBatch) -> bool:
        self.batches.append(batch.batch)
        if not self.ordered:
            return False
        self.ordered = False
        ruin_memory(self.engine)
        for request in batch.requests:
            name = request.request_id
            self.num_failed_with[name] = self.num_failed_with.get(name, 0) + 1
            if len(batch) == 1:
                self.alone.add(name)
        return True

    @rule()
    def order_a_failure(self) -> None:
        self.ordered = True

    @rule(requests=st.lists(REQUESTS, min_size=3, max_size=8))
    def add(self, requests: list[dict[str, Any]]) -> None:
        for fields in requests:
            request = self._request(**fields)
            if not request.splittable and request.num_to_compute > self.engine.max_num_batched_tokens:
                with pytest.raises(RequestError, match="cannot be split"):
                    self.engine.core.add(request)
                continue
            self.engine.add(request)
            self.prompts[request.request_id] = fields["prompt"]
            self.requests[request.request_id] = request
            self.num_outputs[request.request_id] = request.num_output_tokens

    def _request(
        self, prompt: list[int], max_tokens: int, num_outputs: int, scored: bool, **more: Any
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens or 1,
            temperature=0,
            prompt_logprobs=0 if scored or not max_tokens else None,
        )
        task = "generate" if max_tokens else "prompt_logprobs"
        answer = expected_tokens(prompt, max_tokens, stop_ids=more["stop_ids"], layout=self.layout)
        outputs = answer[: min(num_outputs, len(answer) - 1)] if answer else []
        return make_request(
            [*prompt, *outputs], max_tokens, params=params, task=task, num_prompt_tokens=len(prompt), **more
        )

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.pool.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.scheduler.pool.requests)))
        used = self.engine.scheduler.pool.usage().num_used
        num_freed, deltas = self.engine.core.abort(name)
        assert self.engine.scheduler.pool.usage().num_used <= used - num_freed
        self.engine.take(deltas)
        self.aborted.add(name)

    @rule()
    def abort_unknown(self) -> None:
        assert self.engine.core.abort("nobody") == (0, [])

    @invariant()
    def limits_hold(self) -> None:
        engine = self.engine
        for record in engine.records:
            self.num_preemptions_recorded += len(record.preempted)
            assert sum(slot.num_tokens for slot in record.slots) <= engine.max_num_batched_tokens
            assert len({slot.row for slot in record.slots}) == len(record.slots)
            assert all(slot.num_tokens > 0 for slot in record.slots)
            is_new = [slot.request_id in record.admitted_ids for slot in record.slots]
            assert is_new == sorted(is_new), "admissions come last"
            for slot in record.slots:
                request = self.requests[slot.request_id]
                prompt = request.num_prompt_tokens
                assert request.splittable or slot.start >= prompt or slot.num_tokens >= prompt
        engine.records.clear()
        for batch in self.batches:
            num_old, num_decodes = len(batch) - len(batch.admissions), batch.num_decodes
            is_decode = [
                entry < num_old
                and batch.counts[entry] == 1 + len(batch.drafts.get(entry, ()))
                and batch.samples[entry]
                for entry in range(len(batch))
            ]
            assert is_decode == [True] * num_decodes + [False] * (len(batch) - num_decodes)
        self.batches.clear()
        scheduler = engine.scheduler
        holders = [*scheduler.pool.running, *scheduler.pool.lingering]
        assert len(holders) <= engine.max_num_seqs
        assert len({request.row for request in holders}) == len(holders)
        assert scheduler.pool.counts.num_resident <= engine.max_kv_tokens
        scheduler.pool.check()

    @invariant()
    def tokens_are_right(self) -> None:
        for name, tokens in self.engine.outputs.items():
            request = self.requests[name]
            expected = self._expected(request)
            assert tokens == expected[: len(tokens)]
            if name in self.engine.finished and name not in self.aborted:
                last = self.engine.finished[name]
                if last.error:
                    assert name in self.alone or self.num_failed_with[name] >= MAX_FAILURES
                    continue
                assert tokens == expected
                stopped = bool(expected) and expected[-1] in request.stop_ids
                assert last.finish_reason == ("stop" if stopped else "length")
                if request.params.prompt_logprobs is not None and (
                    len(self.prompts[name]) > 1 or not expected
                ):
                    assert self.engine.scores[name] == expected_scores(self.prompts[name], self.layout)

    def _expected(self, request: Request) -> list[int]:
        name = request.request_id
        if name not in self.answers:
            prompt, stop_ids = self.prompts[name], request.stop_ids
            answer = expected_tokens(prompt, request.max_tokens, stop_ids=stop_ids, layout=self.layout)
            self.answers[name] = answer[self.num_outputs[name] :]
        return self.answers[name]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        self.tokens_are_right()
        assert self.engine.finished.keys() == self.prompts.keys(), "every request finishes"
        self.limits_hold()
        usage = self.engine.scheduler.pool.usage()
        assert usage.num_used == usage.num_tokens == 0
        for last in self.engine.finished.values():
            assert last.record is not None
            assert last.record.finished_at is not None
            breakdown = last.record.breakdown
            assert breakdown.total == pytest.approx(
                last.record.finished_at - last.record.arrived_at, abs=1e-12
            )
            parts = (
                breakdown.prefill,
                breakdown.prefill_of_others,
                breakdown.decode,
                breakdown.preempted,
                breakdown.held,
            )
            assert min(*breakdown.queue.values(), *parts) >= 0
            assert breakdown.preempted == 0 or last.record.num_preemptions > 0
        num_preemptions = sum(request.record.num_preemptions for request in self.requests.values())
        assert self.engine.core.stats().num_preemptions == num_preemptions
        # A request may be preempted when its last token is in flight, and no step may come after that.
        num_pending = len(self.engine.scheduler._preempted)
        assert self.num_preemptions_recorded + num_pending == num_preemptions


EngineMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=12, deadline=None)
TestEngineMachine = EngineMachine.TestCase
