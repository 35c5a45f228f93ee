"""Each parameter where its meaning is easy to get wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from inflight.errors import EngineError
from inflight.execution.sampling.interface import HAS_NO_TOKEN, IS_NOT_FINITE
from tests.execution.sampling.sampler_oracle import Bench, acceptable, job, make_sampler, sample_one

pytestmark = pytest.mark.usefixtures("each_sampler")

FALLING = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]


def greedy(logits: list[float], **fields: Any) -> int:
    return sample_one(job(logits, temperature=0, **fields))


def support(num: int = 300, **fields: Any) -> set[int]:
    """Return the tokens that many seeds sample."""
    jobs = [job(seed=seed, **fields) for seed in range(num)]
    return set(Bench(jobs, max_rows=num).sample().token_ids)


# Choosing.


def test_greedy_takes_the_first_of_equals() -> None:
    assert greedy([1, 3, 3, 3, 0]) == 1


def test_smallest_temperatures_are_greedy() -> None:
    assert support(temperature=1e-30, logits=[3e38, 0, -3e38]) == {0}


def test_huge_temperature_makes_all_tokens_equally_likely() -> None:
    assert support(temperature=1e30, logits=FALLING) == set(range(8))


def test_top_k_keeps_the_lower_ids_of_equals() -> None:
    assert support(top_k=3, logits=[0, 1, 1, 1, 1, 0]) == {1, 2, 3}


@pytest.mark.parametrize("vocab_size", [64, 300, 3000, 20_000])
def test_top_k_holds_for_any_number_of_sorted_candidates(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = np.round(rng.normal(size=vocab_size), 1)
    for top_k in (1, 5, 128, 129, 1500, 9000):
        jobs = [job(logits, top_k=top_k, seed=seed, temperature=3) for seed in range(4)]
        for one, token_id in zip(jobs, Bench(jobs).sample().token_ids, strict=True):
            assert token_id in acceptable(one)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert support(top_p=0.5, logits=logits) == {0}
    assert support(top_p=0.51, logits=logits) == {0, 1}
    assert support(top_p=0.8, logits=logits) == {0, 1, 2}
    assert support(top_p=1e-9, logits=logits) == {0}
    assert support(top_p=1e-300, logits=logits[::-1]) == {3}  # 0 in float32
    assert support(top_p=1e-300, top_k=3, logits=logits[::-1]) == {3}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert support(top_p=0.55, top_k=2, logits=logits) == {0}  # 0.4 / 0.7 = 0.571
    assert support(top_p=0.55, logits=logits) == {0, 1}


@pytest.mark.parametrize("spread", [0.0, 0.5, 8.0])
def test_top_p_holds_whether_or_not_the_first_candidates_suffice(spread: float) -> None:
    """Flat rows need all of the vocabulary sorted, peaked ones a few candidates."""
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=spread, size=12_000)
    jobs = [job(logits, top_p=top_p, seed=seed) for seed in range(3) for top_p in (0.05, 0.5, 0.99)]
    for one, token_id in zip(jobs, Bench(jobs).sample().token_ids, strict=True):
        assert token_id in acceptable(one)


def test_min_p_compares_with_the_most_likely_token() -> None:
    logits = np.log([0.5, 0.26, 0.24])
    assert support(min_p=0.5, logits=logits) == {0, 1}
    assert support(min_p=1.0, logits=logits) == {0}
    assert support(min_p=0.5, top_p=0.6, logits=logits) == {0}  # 0.5 / 0.76 = 0.66 of what min_p left


def test_restriction_changes_nothing_while_the_winner_is_allowed() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=500)
    jobs = [job(logits, seed=seed) for seed in range(200)]
    free = Bench(jobs, max_rows=200).sample().token_ids
    best = set(np.argsort(-logits)[:40].tolist())
    for options in ({"top_k": 40}, {"top_k": 40, "top_p": 0.999999}, {"allowed_token_ids": sorted(best)}):
        cut = [job(logits, seed=seed, **options) for seed in range(200)]
        actual = Bench(cut, max_rows=200).sample().token_ids
        assert set(actual) <= best
        assert [f for f, unbound in zip(actual, free, strict=True) if unbound in best] == [
            unbound for unbound in free if unbound in best
        ]


# Forbidding.


def test_only_allowed_ids_are_sampled_and_unknown_ids_are_ignored() -> None:
    assert greedy(FALLING, allowed_token_ids=[3, 6, 3, 99]) == 3
    assert support(logits=FALLING, allowed_token_ids=[3, 6]) == {3, 6}


@pytest.mark.parametrize(
    ("word", "outputs", "forbidden"),
    [
        ((0,), [], True),
        ((0,), [5, 6], True),
        ((6, 0), [5, 6], True),
        ((6, 0), [6, 5], False),
        ((5, 6, 0), [5, 6], True),
        ((5, 6, 0), [7, 5, 6], True),
        ((4, 6, 0), [5, 6], False),
        ((3, 6, 0), [6], False),  # the 3 is in the prompt
        ((3, 0), [], False),
        ((6, 99, 0), [6], False),  # no token 99: never matches
    ],
)
def test_bad_words_match_the_last_outputs(word: tuple[int, ...], outputs: list[int], forbidden: bool) -> None:
    actual = greedy(FALLING, prompt=[1, 2, 3], outputs=outputs, bad_words=(word,))
    assert actual == (1 if forbidden else 0)


def test_bad_words_that_share_their_last_token_do_not_undo_each_other() -> None:
    words = ((6, 0), (7, 0), (0,), (4, 5, 0), (1, 1))
    assert greedy(FALLING, outputs=[2, 6], bad_words=words) == 1
    assert greedy(FALLING, outputs=[2, 1], bad_words=words) == 2
    assert greedy(FALLING, outputs=[2, 1], bad_words=words[::-1]) == 2


def test_stop_ids_wait_for_min_tokens() -> None:
    fields = {"stop_ids": frozenset({0, 1, 5000}), "min_tokens": 2, "prompt": [3, 4]}
    assert greedy(FALLING, outputs=[], **fields) == 2
    assert greedy(FALLING, outputs=[7], **fields) == 2
    assert greedy(FALLING, outputs=[7, 7], **fields) == 0


def test_bias_cannot_lift_a_forbidden_token() -> None:
    assert greedy(FALLING, logit_bias={6: 100.0, 5: 50.0}, bad_words=((6,),)) == 5


def test_entry_without_an_allowed_token_fails_alone() -> None:
    stuck = job(FALLING, temperature=0, allowed_token_ids=[2], bad_words=((2,),))
    jobs = [job(FALLING, seed=1), stuck, job(FALLING, temperature=0)]
    sampled = Bench(jobs).sample()
    assert sampled.bad == [0, HAS_NO_TOKEN, 0]
    assert sampled.token_ids[0] == sample_one(jobs[0])
    assert sampled.token_ids[2] == 0


# Penalties.


def test_repetition_penalty_covers_prompt_and_outputs_on_both_sides_of_zero() -> None:
    assert greedy([4.0, 3.0, 1.9], prompt=[0], outputs=[1], repetition_penalty=2.0) == 0
    assert greedy([4.0, 3.0, 2.1], prompt=[0], outputs=[1], repetition_penalty=2.0) == 2
    assert greedy([-1.0, -1.5], prompt=[0, 0, 0], repetition_penalty=2.0) == 1  # -2 once, however often seen


def test_frequency_counts_and_presence_does_not() -> None:
    logits = [2.0, 1.0]
    assert greedy(logits, prompt=[1, 0, 0, 0], outputs=[0], frequency_penalty=0.6) == 0
    assert greedy(logits, prompt=[1], outputs=[0, 0], frequency_penalty=0.6) == 1
    assert greedy(logits, prompt=[1], outputs=[0, 0], presence_penalty=0.6) == 0
    assert greedy(logits, prompt=[1, 0, 0], outputs=[], presence_penalty=2.0) == 0


def test_resumed_request_still_tells_prompt_from_outputs() -> None:
    """After a preemption all its tokens arrive at once; those behind num_prompt_tokens are outputs."""
    resumed = job([2.0, 1.0, 0.0], prompt=[0], outputs=[2, 2], temperature=0, presence_penalty=1.5)
    assert sample_one(resumed) == 0
    assert (
        sample_one(job([2.0, 1.0, 0.0], prompt=[2], outputs=[0, 2], temperature=0, presence_penalty=1.5)) == 1
    )


def test_short_row_beside_a_long_one_sees_its_own_tokens_only() -> None:
    options = {"temperature": 0, "repetition_penalty": 10.0, "presence_penalty": 2.0}
    long = job([1.0, 0.5, 0.0], prompt=[2] * 20, outputs=[0] * 20, **options)
    short = job([1.0, 0.5, 0.0], prompt=[1], outputs=[2], **options)
    assert Bench([long, short]).sample().token_ids == [1, 0]


def test_tokens_sampled_after_admission_count() -> None:
    bench = Bench([job([2.0, 1.0], prompt=[1], temperature=0, frequency_penalty=0.4)])
    actual = []
    for length in range(1, 6):
        sampled = bench.sampler.sample(
            torch.tensor([[2.0, 1.0]]), bench.rows, torch.tensor([length]), bench.tokens
        )
        bench.tokens[bench.rows[0], length] = sampled.token_ids[0]
        actual += sampled.token_ids
    assert actual == [0, 0, 0, 1, 0]  # 2, 1.6, 1.2, then 0.8 < 1, then 0.8 > 0.6


def test_smallest_repetition_penalty_does_not_divide_by_zero() -> None:
    sampled = Bench([job([0.0, -1.0], prompt=[0], temperature=0, repetition_penalty=1e-300)]).sample()
    assert sampled.token_ids == [0]
    assert sampled.bad == [0]


# Rows, failures, edges.


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_non_finite_logits_fail_only_their_row(poison: float, options: dict[str, float]) -> None:
    """A lone -inf is an ordinary forbidden token; a row of them is not."""
    spoiled = [poison] * 8 if poison == -math.inf else [*FALLING[:3], poison, *FALLING[4:]]
    jobs = [job(FALLING, seed=3, logprobs=2, **options) for _ in range(3)]
    clean = Bench(jobs).sample()
    # Whatever its parameters forbid, it is the model that is to blame.
    jobs[1] = job(spoiled, seed=3, logprobs=2, repetition_penalty=1.2, bad_words=((2,),), **options)
    mixed = Bench(jobs).sample()
    assert mixed.bad == [0, IS_NOT_FINITE, 0]
    assert 0 <= mixed.token_ids[1] < 8
    assert mixed.token_ids[1] == Bench([jobs[1]]).sample().token_ids[0]
    for entry in (0, 2):
        assert mixed.token_ids[entry] == clean.token_ids[entry]
        assert mixed.logprobs[entry] == clean.logprobs[entry]


def test_single_forbidden_token_does_not_fail_the_row() -> None:
    assert Bench([job([-math.inf, 1.0, 0.5])]).sample().bad == [0]


def test_reused_row_takes_the_new_parameters() -> None:
    bench = Bench([job(FALLING, temperature=0, allowed_token_ids=[4])])
    assert bench.sample().token_ids == [4]
    bench.state.set(bench.rows[0], job(FALLING, temperature=0).request())
    assert bench.sample().token_ids == [0]


def test_row_without_a_request_cannot_sample() -> None:
    bench = Bench([job(FALLING)])
    bench.rows = [0]
    with pytest.raises(EngineError, match="row 0 "):
        bench.sample()


def test_empty_step_samples_nothing(each_sampler: str) -> None:
    sampler = make_sampler(each_sampler, 4, 8)
    sampled = sampler.sample(torch.empty(0, 8), [], torch.empty(0).long(), torch.zeros(4, 4).int())
    assert sampled.token_ids == []
