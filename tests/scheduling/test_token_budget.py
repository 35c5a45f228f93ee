"""Step times that decoding requests can tolerate, on a clock that only steps advance."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from inflight.config import SchedulerConfig
from inflight.errors import ConfigError
from inflight.scheduling.policy import FIRST_TOKENS, MIN_CHUNK, PROMPTS_AT_ONCE, TimedTokenBudget, TokenBudget
from tests.support.fake_runner import expected_tokens
from tests.support.timed import BASE, EACH, MAX_TOKENS, Timed, timed


def sizes_beside_decodes(engine: Timed, decodes: int) -> list[int]:
    """Return the sizes of the steps that compute two long prompts, once the token budget has settled."""
    for _ in range(decodes):
        engine.add(4, 400)
    for _ in range(6):
        engine.step()
    prompts = [engine.add(18_000, 2), engine.add(12_000, 2)]
    while not all(name in engine.outputs for name in prompts):
        engine.step()
    return [size for size in engine.sizes() if size > 2 * decodes][12:]


@pytest.mark.parametrize("target", [8.0, 12.0, 40.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_converge_to_the_target_time(target: float, depth: int) -> None:
    settled = sizes_beside_decodes(Timed(TimedTokenBudget(MAX_TOKENS, target / 1000), depth), 1)[
        :-2
    ]  # the last are shorter
    fitting = (target - BASE) / EACH
    assert settled
    assert all(0.9 * fitting <= size <= 1.1 * fitting for size in settled)


def test_tokens_do_not_depend_on_step_times() -> None:
    for token_budget in (
        TokenBudget(MAX_TOKENS),
        TimedTokenBudget(MAX_TOKENS, 0.006),
        TimedTokenBudget(MAX_TOKENS, 1e-9),
    ):
        engine = Timed(token_budget, 2)
        names = {engine.add(length, 5): length for length in (3, 700, 1300)}
        while engine.core.has_work:
            engine.step()
        for name, length in names.items():
            assert engine.outputs[name] == expected_tokens([i % 40 for i in range(length)], 5)


def test_without_a_target_or_without_decodes_a_step_takes_all_it_may() -> None:
    assert TokenBudget(MAX_TOKENS).limit(5, 1) == MAX_TOKENS
    assert TimedTokenBudget(MAX_TOKENS, 0.001).limit(0, 1) == MAX_TOKENS


def test_steps_grow_as_more_prompts_wait() -> None:
    token_budget = TimedTokenBudget(MAX_TOKENS, 0.012)
    budgets = [token_budget.limit(1, count) for count in range(1, 200)]
    assert budgets[:PROMPTS_AT_ONCE] == [FIRST_TOKENS] * PROMPTS_AT_ONCE
    assert all(one <= other for one, other in itertools.pairwise(budgets))
    assert budgets[-1] == MAX_TOKENS


SIZES = (64, 128, 192, 256, 384, 512, 1024, MAX_TOKENS)


def test_steps_fill_the_size_that_they_are_rounded_up_to() -> None:
    token_budget = TimedTokenBudget(MAX_TOKENS, 0.012, SIZES)
    assert token_budget.limit(1, 1) == 256 == FIRST_TOKENS
    assert token_budget.limit(1, PROMPTS_AT_ONCE + 1) == 256  # 320 would fit, and take as long as 384
    assert token_budget.limit(1, 2 * PROMPTS_AT_ONCE) == 512
    assert (
        token_budget.limit(150, 1) == 384
    )  # 150 decodes and some of a prompt, no more than fit, or as few as there are
    assert token_budget.limit(5000, 1) == MAX_TOKENS
    assert token_budget.limit(0, 1) == MAX_TOKENS


def test_rounded_up_step_is_timed_as_a_full_one() -> None:
    token_budget, full = (TimedTokenBudget(MAX_TOKENS, 0.012, SIZES) for _ in range(2))
    for _ in range(8):
        token_budget.observe(400, 0.013, True)  # as long as 512 take
        full.observe(512, 0.013, True)
    assert token_budget.limit(1, 1) == full.limit(1, 1) == 384


@pytest.mark.parametrize("decodes", [1, 40])
def test_filled_steps_stay_within_the_target_time(decodes: int) -> None:
    settled = sizes_beside_decodes(Timed(TimedTokenBudget(MAX_TOKENS, 0.012, SIZES), 2, SIZES), decodes)
    assert max(settled) == 384  # 11.7 ms; 512 would be 14.2
    assert len(settled) - settled.count(384) <= 2  # the last tokens of a prompt may be fewer


def test_prompts_progress_however_slow_steps_are() -> None:
    token_budget = TimedTokenBudget(MAX_TOKENS, 0.001)
    for _ in range(20):
        token_budget.observe(FIRST_TOKENS, 10.0, True)
    assert token_budget.limit(1, 1) >= MIN_CHUNK
    assert token_budget.limit(500, 1) == 500 + MIN_CHUNK
    assert token_budget.limit(MAX_TOKENS - 1, 1) == MAX_TOKENS


def test_one_slow_step_is_soon_forgotten() -> None:
    token_budget = TimedTokenBudget(MAX_TOKENS, 0.012)

    def settle() -> int:
        for _ in range(20):
            size = token_budget.limit(1, 1)
            token_budget.observe(size, timed(size), True)
        return token_budget.limit(1, 1)

    usual = settle()
    token_budget.observe(usual, 3.0, True)
    assert token_budget.limit(1, 1) < usual
    assert settle() == pytest.approx(usual, rel=0.01)


def test_fixed_cost_of_a_step_is_not_charged_to_tokens() -> None:
    """Without it, a step well below the target looks as if the next larger size were too large."""
    alone, beside = (TimedTokenBudget(MAX_TOKENS, 0.012, SIZES) for _ in range(2))
    beside.observe(1, timed(1), False)
    for _ in range(10):
        for token_budget in (alone, beside):
            size = token_budget.limit(1, 1)
            token_budget.observe(size, timed(size), True)
    assert (alone.limit(1, 1), beside.limit(1, 1)) == (256, 384)


def test_estimate_grows_to_at_most_twice_the_measured_step() -> None:
    token_budget = TimedTokenBudget(MAX_TOKENS, 0.012)
    token_budget.observe(1, 0.004, False)
    token_budget.observe(FIRST_TOKENS, 0.004001, True)
    assert FIRST_TOKENS < token_budget.limit(1, 1) <= 2 * FIRST_TOKENS
    token_budget.observe(FIRST_TOKENS, 0.003, True)  # faster than one without prompts
    assert token_budget.limit(1, 1) <= 2 * FIRST_TOKENS


def test_small_steps_do_not_change_the_estimate() -> None:
    token_budget = TimedTokenBudget(MAX_TOKENS, 0.012)
    token_budget.observe(FIRST_TOKENS // 2 - 1, 1e-6, True)
    token_budget.observe(FIRST_TOKENS, 0.0, True)
    assert token_budget.limit(1, 1) == FIRST_TOKENS


@pytest.mark.parametrize("target", [-1, float("nan"), float("inf"), "12", True])
def test_invalid_target_is_rejected(target: Any) -> None:
    with pytest.raises(ConfigError, match="target_step_ms"):
        SchedulerConfig(target_step_ms=target)
