"""Log-probabilities and ranks of the raw logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.events import PositionLogprobs, unpack_logprobs
from tests.execution.sampling.sampler_oracle import Bench, job, make_sampler

pytestmark = pytest.mark.usefixtures("each_sampler")


def prompt_scores(logits: Tensor, targets: Tensor, num: int) -> list[PositionLogprobs]:
    """Sample with the sampler that is tested."""
    return make_sampler(Bench.default_kind, 1, logits.shape[1]).score_prompt(logits, targets, num)


def reference(logits: NDArray[Any], target: int, num: int) -> list[tuple[int, float, int]]:
    """Compute the norm by its definition, in float64."""
    x = np.asarray(logits, dtype=np.float32).astype(np.float64)
    logprobs = x - x.max() - math.log(np.exp(x - x.max()).sum())
    best = sorted(range(len(x)), key=lambda i: (-x[i], i))[:num]
    ids = [target, *(i for i in best if i != target)]
    return [(i, float(logprobs[i]), 1 + int((x > x[i]).sum())) for i in ids]


def check(actual: PositionLogprobs, expected: list[tuple[int, float, int]]) -> None:
    candidates = unpack_logprobs(actual)
    assert [(c.token_id, c.rank) for c in candidates] == [(i, rank) for i, _, rank in expected]
    assert [c.logprob for c in candidates] == pytest.approx([logprob for _, logprob, _ in expected], abs=2e-6)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_logprobs_are_of_the_raw_logits_whatever_the_parameters(options: dict[str, float]) -> None:
    rng = np.random.default_rng(4)
    logits = np.round(rng.normal(size=30), 1)
    jobs = [
        job(
            logits,
            seed=seed,
            logprobs=4,
            outputs=[1, 2],
            logit_bias={3: 9.0},
            frequency_penalty=1.0,
            **options,
        )
        for seed in range(6)
    ]
    sampled = Bench(jobs).sample()
    for entry, token_id in enumerate(sampled.token_ids):
        check(sampled.logprobs[entry], reference(logits, token_id, 4))


def test_each_entry_gets_as_many_logprobs_as_it_requested() -> None:
    logits = [0.0, 3.0, 1.0, 2.0, 3.0]
    counts = [None, 0, 2, 100, None, 5]
    jobs = [job(logits, temperature=0, logprobs=count) for count in counts]
    sampled = Bench(jobs).sample()
    assert sorted(sampled.logprobs) == [1, 2, 3, 5]
    for entry, actual in sampled.logprobs.items():
        check(actual, reference(np.array(logits), 1, counts[entry] or 0))


def test_equal_logits_share_their_rank_in_the_order_of_their_ids() -> None:
    (actual,) = Bench([job([1.0, 2.0, 2.0, 1.0, 2.0], temperature=0, logprobs=5)]).sample().logprobs.values()
    assert [(c.token_id, c.rank) for c in unpack_logprobs(actual)] == [(1, 1), (2, 1), (4, 1), (0, 4), (3, 4)]


def test_batch_without_logprobs_has_none() -> None:
    assert Bench([job([0.0, 1.0])]).sample().logprobs == {}


@pytest.mark.parametrize("num", [0, 1, 7, 1000])
def test_prompt_positions_list_the_target_first_and_every_id_once(num: int) -> None:
    rng = np.random.default_rng(num)
    logits = np.round(rng.normal(size=(70, 40)), 1).astype(np.float32)
    targets = rng.integers(0, 40, 70)
    actual = prompt_scores(torch.from_numpy(logits), torch.from_numpy(targets), num)
    assert len(actual) == 70
    for row, target, position in zip(logits, targets.tolist(), actual, strict=True):
        check(position, reference(row, target, num))


def test_no_prompt_positions_give_no_logprobs() -> None:
    assert prompt_scores(torch.empty(0, 40), torch.empty(0).long(), 5) == []


def test_prompt_position_does_not_depend_on_its_chunk() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 20_000), torch.randint(0, 20_000, (9,))
    whole = prompt_scores(logits, targets, 3)
    parts = [prompt_scores(logits[i : i + 1], targets[i : i + 1], 3)[0] for i in range(9)]
    assert whole == parts
