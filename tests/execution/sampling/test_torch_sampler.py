"""Parts of the torch sampler: candidates, sums, and features that are skipped when no row uses them."""

from __future__ import annotations

import math

import pytest
import torch

from inflight.execution.sampling import gumbel, sampler
from inflight.execution.sampling.gumbel import log_exponential, noise_key, top_candidates
from tests.execution.sampling.sampler_oracle import Bench, job, sample_one
from tests.execution.sampling.test_independence import VOCAB, mixed_jobs

FALLING = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]


def test_order_of_candidates_is_total() -> None:
    logits = torch.tensor([[0.0, -0.0, 1.0, -1.0, -math.inf, 1e-45, -1e-45, 0.0]])
    for width in range(1, 9):
        values, token_ids = top_candidates(logits, width)
        assert token_ids.tolist() == [[2, 5, 0, 1, 7, 6, 3, 4][:width]]
        assert torch.equal(values, logits.gather(1, token_ids))


def test_greedy_batch_costs_no_more_than_two_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that nobody uses are never entered."""
    for name in ("adjust", "sample_dense", "sample_nucleus", "sample_top_k", "score", "noise_key"):
        monkeypatch.setattr(sampler, name, None)
    jobs = [job(FALLING, temperature=0, top_p=0.5, top_k=3, min_p=0.1) for _ in range(3)]
    assert Bench(jobs).sample().to_host().token_ids == [0, 0, 0]


def test_temperature_only_batch_never_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "top_candidates", None)
    assert 0 <= sample_one(job(FALLING, temperature=0.7, min_p=0.1)) < 8


def test_result_does_not_depend_on_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(mixed_jobs(7))
    expected = bench.sample().to_host()
    monkeypatch.setattr(gumbel, "CPU_TILE", 1)
    assert bench.sample().to_host() == expected


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_torch_softmax_does_not_depend_on_other_rows(name: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 152_000)
    whole = getattr(x, name)(-1)
    for first, last in ((0, 1), (2, 3), (1, 6), (0, 5)):
        assert torch.equal(getattr(x[first:last].clone(), name)(-1), whole[first:last])


def test_noise_is_the_same_alone_in_a_batch_and_gathered() -> None:
    rows = 5
    seeds = torch.arange(rows, dtype=torch.int32)
    key = noise_key(seeds, seeds * 77, seeds + 100)
    token_ids = torch.arange(VOCAB, dtype=torch.int32)
    whole = log_exponential(key, token_ids)
    some = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:131].int()
    for row in range(rows):
        one = noise_key(seeds[row : row + 1], seeds[row : row + 1] * 77, seeds[row : row + 1] + 100)
        assert torch.equal(log_exponential(one, token_ids)[0], whole[row])
        assert torch.equal(log_exponential(one, some)[0], whole[row, some.long()])
