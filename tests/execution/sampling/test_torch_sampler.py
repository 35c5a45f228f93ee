"""Parts of the torch sampler: candidates, sums, and features that are skipped by rows that do not use them."""

from __future__ import annotations

import math

import pytest
import torch

from inflight.execution.runner import torch_threads
from inflight.execution.sampling import sampler
from inflight.execution.sampling.gumbel import log_exponential, noise_key
from inflight.execution.sampling.sampler import best_ids
from tests.execution.sampling.sampler_oracle import Bench, job, sample_one
from tests.execution.sampling.test_independence import VOCAB

FALLING = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]


def test_order_of_candidates_is_total() -> None:
    logits = torch.tensor([0.0, -0.0, 1.0, -1.0, -math.inf, 1e-45, -1e-45, 0.0])
    for count in range(9):
        assert best_ids(logits, count).tolist() == [2, 5, 0, 1, 7, 6, 3, 4][:count]


def test_greedy_rows_neither_sort_nor_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that a row does not use are never entered."""
    for name in ("best_ids", "_nucleus", "score", "noise_key"):
        monkeypatch.setattr(sampler, name, None)
    jobs = [job(FALLING, temperature=0, top_p=0.5, top_k=3, min_p=0.1) for _ in range(3)]
    assert Bench(jobs).sample().token_ids == [0, 0, 0]


def test_temperature_only_rows_never_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "best_ids", None)
    assert 0 <= sample_one(job(FALLING, temperature=0.7, min_p=0.1)) < 8


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_torch_softmax_does_not_depend_on_the_threads(name: str) -> None:
    """Neither does a token: how many threads torch has is a question of how many rows there are."""
    torch.manual_seed(1)
    x = torch.randn(152_000)
    jobs = [job(x.numpy(), temperature=0.9, top_p=0.9, logprobs=3), job(x.numpy(), top_k=50, top_p=0.5)]
    results = []
    for num_threads in (1, 2, 7):
        with torch_threads(num_threads):
            results.append((getattr(x, name)(0).tolist(), Bench(jobs).sample()))
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_nucleus_does_not_depend_on_how_many_candidates_are_sorted(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    jobs = [job(torch.randn(3000).mul(2).numpy(), top_p=top_p, seed=seed) for seed in range(5)]
    expected = Bench(jobs).sample()
    for widths in ((), (1,), (7, 40, 500)):
        monkeypatch.setattr(sampler, "CANDIDATE_WIDTHS", widths)
        assert Bench(jobs).sample() == expected


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
