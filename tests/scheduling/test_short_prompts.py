"""Prompts with little left to compute do not wait for long ones, and cost them next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policies.fair import Fair
from inflight.scheduling.policy import Policy
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request

BUDGET = 512


def make_engine(policy: str | Callable[[], Policy] = "continuous", **options: object) -> FakeEngine:
    defaults = {
        "num_blocks": 8000,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": BUDGET,
    }
    return FakeEngine(policy, **(defaults | options))  # type: ignore[arg-type]


def add_long(engine: FakeEngine, count: int, length: int = 3500, tenant: str = "a") -> list[Request]:
    return [
        engine.add(make_request([number] * length, 2, request_id=f"{tenant}-{number}", tenant=tenant))
        for number in range(count)
    ]


def steps_to_first_token(engine: FakeEngine, request: Request, at_most: int = 2000) -> int:
    for count in range(1, at_most):
        engine.step()
        if engine.outputs[request.request_id]:
            return count
    raise AssertionError(f"no token after {at_most} steps")


@pytest.mark.parametrize("policy", ["continuous", "fair"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 9])
@pytest.mark.parametrize(("length", "at_most"), [(3, 1), (100, 1), (256, 3)])
def test_short_prompt_does_not_wait_for_long_prompts_of_others(
    policy: str, depth: int, num_steps: int, length: int, at_most: int
) -> None:
    engine = make_engine(policy, pipeline_depth=depth)
    add_long(engine, 20)
    for _ in range(num_steps):
        engine.step()
    short = engine.add(make_request([7] * length, 4, tenant="b"))
    # In `fair` its tenant may be the second to be served.
    assert steps_to_first_token(engine, short) <= at_most + (depth - 1) + (policy == "fair")
    assert engine.outputs[short.request_id][:1] == expected_tokens([7] * length, 1)


@pytest.mark.parametrize("policy", ["continuous", "fair"])
def test_long_prompts_lose_no_more_than_the_tokens_of_short_ones(policy: str) -> None:
    def steps_of_long_prompts(num_short: int) -> int:
        engine = make_engine(policy)
        long = add_long(engine, 20, length=1100)
        count = 0
        while any(request.request_id not in engine.finished for request in long):
            if count % 4 == 0 and num_short:
                num_short -= 1
                engine.add(make_request([count] * 50, 1, tenant="b"))
            engine.step()
            count += 1
        return count

    alone = steps_of_long_prompts(0)
    assert alone == -(-20 * (1100 + 1) // BUDGET) + 1  # every step is full but the last
    assert steps_of_long_prompts(1) <= alone + 1
    assert steps_of_long_prompts(10) <= 1.05 * alone


def test_nothing_is_held_back_while_no_short_prompt_waits() -> None:
    engine = make_engine()
    add_long(engine, 4)
    for _ in range(27):
        engine.step()
        assert sum(slot.num_tokens for slot in engine.records[-1].slots) == BUDGET


def test_unused_part_of_the_reserve_goes_to_long_prompts() -> None:
    engine = make_engine()
    add_long(engine, 4)
    engine.step()
    engine.add(make_request([9] * 3, 4))
    engine.step()
    assert [slot.num_tokens for slot in engine.records[-1].slots] == [BUDGET - 3, 3]


def test_endless_short_prompts_leave_long_ones_three_quarters_of_every_step() -> None:
    engine = make_engine(max_num_seqs=512)
    (long,) = add_long(engine, 1)
    number = 0
    for _ in range(3500 // (BUDGET * 3 // 4) + 2):
        for _ in range(20):
            number += 1
            engine.add(make_request([number % 40, *[7] * 99], 1))
        engine.step()
    assert long.request_id in engine.finished


def test_long_prompt_with_a_cached_prefix_is_short() -> None:
    engine = make_engine()
    chat = [5] * 2000
    engine.add(make_request(chat, 1))
    engine.run()
    add_long(engine, 20)
    engine.step()
    turn = engine.add(make_request([*chat, *[6] * 100], 1, tenant="b"))
    other = engine.add(make_request([8] * 2100, 1, tenant="b"))
    assert steps_to_first_token(engine, turn) <= 2
    assert turn.num_cached >= 1900
    for _ in range(20):
        engine.step()
    assert not engine.outputs[other.request_id], "without the prefix it has to wait"


def test_prompt_whose_prefix_was_evicted_waits_its_turn() -> None:
    engine = make_engine()
    chat = [5] * 2000
    engine.add(make_request(chat, 1))
    engine.run()
    add_long(engine, 3)
    engine.step()
    turn = engine.add(make_request([*chat, *[6] * 100], 1, tenant="b"))
    policy = engine.policy_given
    assert policy.tokens_ahead([], BUDGET) > 0, "with its hits it is short"
    engine.core.reset_prefix_cache()
    engine.step()
    assert turn.num_computed == 0
    engine.run()
    assert engine.outputs[turn.request_id] == expected_tokens(turn.token_ids[:2100], 1)


def test_only_short_prompts_come_first_come_first_served() -> None:
    """No tokens are reserved, so no prompt is split where the reserve would begin."""
    engine = make_engine()
    requests = [engine.add(make_request([number] * 100, 1)) for number in range(12)]
    engine.step()
    tokens = {slot.request_id: slot.num_tokens for slot in engine.records[-1].slots}
    assert [tokens.get(request.request_id, 0) for request in requests[:6]] == [100] * 5 + [12]


@pytest.mark.parametrize("ageing", [0, 4, 16])
def test_short_prompts_pass_one_that_lacks_memory_no_more_often_than_ageing_allows(ageing: int) -> None:
    engine = make_engine(partial(Continuous, ageing=ageing), num_blocks=100, caching=False)
    engine.add(make_request([0] * 1000, 60))
    engine.step()
    engine.step()
    engine.step()
    large = engine.add(make_request([1] * 1400, 2))
    shorts = [engine.add(make_request([number], 1)) for number in range(60)]
    while large.status.name == "WAITING":
        engine.step()
    admitted = sum(request.record.admitted_at is not None for request in shorts)
    assert admitted == ageing
    engine.run()


def test_short_prompt_does_not_take_the_memory_of_a_running_prompt() -> None:
    engine = make_engine(num_blocks=110, caching=False)
    long = engine.add(make_request([0] * 1700, 2))  # all but 3 blocks
    engine.step()
    shorts = [engine.add(make_request([number] * 20, 8)) for number in range(6)]
    engine.run()
    assert engine.core.stats().num_preemptions == 0
    assert long.record.first_token_at is not None
    assert all(request.request_id in engine.finished for request in shorts)


def test_scored_prompt_is_long_though_its_chunks_are_short() -> None:
    engine = make_engine()
    scores = SamplingParams(prompt_logprobs=0, temperature=0)
    add_long(engine, 3)
    scored = engine.add(make_request([3] * 2000, 0, params=scores, task="prompt_logprobs"))
    engine.step()
    short = engine.add(make_request([4] * 3, 1))
    assert steps_to_first_token(engine, short) == 1
    assert scored.num_computed == 0


def test_short_text_that_must_not_be_split_passes_long_ones() -> None:
    engine = make_engine(caching=False)
    params = SamplingParams(temperature=0)
    texts = [
        engine.add(make_request([n] * 500, 0, params=params, task="pool", splittable=False))
        for n in range(20)
    ]
    engine.step()
    short = engine.add(make_request([4] * 200, 0, params=params, task="pool", splittable=False))
    engine.step()
    assert short.request_id in engine.finished
    engine.run()
    assert all(text.request_id in engine.vectors for text in texts)


def test_fair_tenants_share_the_steps_while_their_prompts_run() -> None:
    engine = make_engine(lambda: Fair(weights={"a": 1.0, "b": 3.0}), caching=False)
    add_long(engine, 8, tenant="a")
    engine.step()
    add_long(engine, 8, length=3600, tenant="b")
    for _ in range(60):
        engine.step()
    tokens = dict.fromkeys("ab", 0)
    for record in engine.records[1:]:
        for slot in record.slots:
            tokens[slot.request_id[0]] += slot.num_tokens
    assert tokens["b"] == pytest.approx(3 * tokens["a"], abs=4 * BUDGET), "up to a step's tokens of each"


def test_fair_charges_a_prompt_once_though_it_was_preempted() -> None:
    policy = Fair(headroom=0, output_cost=0.0)
    engine = make_engine(lambda: policy, num_blocks=12, block_size=4, max_num_batched_tokens=8)
    for number in range(6):
        engine.add(make_request([number] * 20, 16, tenant="a"))
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    assert policy.counters["a"] == 6 * 20


def test_fair_serves_a_new_tenant_before_the_running_prompts_of_many_others() -> None:
    engine = make_engine("fair", caching=False)
    for number in range(20):
        add_long(engine, 1, length=3500 + number, tenant=f"t{number}")
    for _ in range(20):  # all of them run now
        engine.step()
    engine.add(
        make_request([8], 100, tenant="reader")
    )  # the last to leave the queue, and charged in every step
    for _ in range(10):
        engine.step()
    assert engine.scheduler.pool.num_waiting == 0
    short = engine.add(make_request([7] * 3, 1, tenant="new"))
    assert steps_to_first_token(engine, short) == 1
