"""Ranks that have parts of the logits sample the tokens that one rank samples from all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.events import PositionLogprobs, unpack_logprobs
from inflight.execution.sampling import HAS_NO_TOKEN, IS_NOT_FINITE
from inflight.execution.sampling.triton import RankTokens, sample_by_ranks
from tests.execution.sampling.sampler_oracle import Bench, Job, job
from tests.execution.sampling.triton.test_sampler import (
    MIXTURE,
    SPECIAL,
    KernelBench,
    Results,
    some_logits,
)

VOCAB = 601  # parts of uneven sizes, whatever the number of ranks
GROUP = 8
NEEDS_ALL = {"top_p", "min_p"}  # without a small top_k


@dataclass
class RanksInTurn:
    """Ranks are threads that take turns: each runs until it needs the others. Unwanted columns are NaN."""

    size: int
    num_columns: list[list[int]] = field(default_factory=list)  # of rank 0's gathers, in order
    _one: threading.Lock = field(default_factory=threading.Lock)
    _parts: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by number of the gather, and rank

    def __post_init__(self) -> None:
        self._all_came = threading.Barrier(self.size)

    def together(self, work: Any) -> list[Any]:
        def turn(rank: int) -> Any:
            with self._one:
                return work(rank, TurnCollective(self, rank))

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(turn, range(self.size)))

    def give(self, number: int, rank: int, x: Tensor) -> list[Tensor]:
        self._parts[number, rank] = x.clone()
        self._one.release()
        self._all_came.wait(60)
        self._one.acquire()
        return [self._parts[number, peer] for peer in range(self.size)]


@dataclass
class TurnCollective:
    """One rank's collective."""

    turns: RanksInTurn
    rank: int
    number: int = 0
    capturable = False

    def sum(self, x: Tensor) -> Tensor:  # noqa: ARG002
        raise AssertionError("nothing is summed here")

    def gather(self, x: Tensor, widths: Sequence[int], num_needed: Tensor | None = None) -> Tensor:
        assert num_needed is not None
        assert x.shape[1] == widths[self.rank]
        if self.rank == 0:
            self.turns.num_columns.append(num_needed.tolist())
        self.number += 1
        parts = self.turns.give(self.number, self.rank, x)
        return torch.cat(
            [part.where(_columns(part) < num_needed[:, None], torch.nan) for part in parts], dim=1
        )


def _columns(part: Tensor) -> Tensor:
    return torch.arange(part.shape[1], device=part.device)


@dataclass
class Answers:
    one: Results
    ranks: list[Results]
    num_columns: list[list[int]]  # read of each rank, by entry: candidates, logits, counts


def sample(jobs: list[Job], num_ranks: int) -> Answers:
    """Sample with one rank and with several, each with its own rows and workspace; one entry is padding."""
    bench = Bench(jobs, max_rows=len(jobs) + 1)
    entries = [*range(3), -1, *range(3, len(jobs))]
    turns = RanksInTurn(num_ranks)

    def work(rank: int, collective: TurnCollective) -> Results:
        kernels = KernelBench(bench, GROUP)
        batch, logits, counts = kernels.inputs(entries)
        parts = logits.tensor_split(num_ranks, dim=1)
        sizes = [part.shape[1] for part in parts]
        part = RankTokens(sum(sizes[:rank]), sizes, collective)
        sample_by_ranks(
            parts[rank].contiguous(), part, batch, kernels.rows, kernels.tokens, kernels.workspace
        )
        return kernels.results(batch, counts)

    one = KernelBench(bench, GROUP).sample(entries)
    return Answers(one, turns.together(work), turns.num_columns)


def check(answers: Results, expected: Results) -> None:
    assert answers.ids == expected.ids
    assert answers.bad == expected.bad
    assert torch.equal(answers.tokens, expected.tokens)
    assert answers.logprobs.keys() == expected.logprobs.keys()
    for entry, position in answers.logprobs.items():
        same_logprobs(position, expected.logprobs[entry])


def same_logprobs(position: PositionLogprobs, other: PositionLogprobs) -> None:
    answers, expected = unpack_logprobs(position), unpack_logprobs(other)
    assert [(t.token_id, t.rank) for t in answers] == [(t.token_id, t.rank) for t in expected]
    assert [t.logprob for t in answers] == pytest.approx([t.logprob for t in expected], abs=1e-5)


def some_jobs(rng: np.random.Generator, kind: str, options: Sequence[dict[str, Any]]) -> list[Job]:
    return [
        job(
            some_logits(rng, VOCAB, kind),
            prompt=[int(i) for i in rng.integers(0, VOCAB, 5)],
            outputs=[int(i) for i in rng.integers(0, 10, int(rng.integers(0, 12)))],
            seed=int(rng.integers(0, 2**62)),
            **option,
        )
        for option in options
    ]


# Combinations that the other lists lack.
LOGPROBS: list[dict[str, Any]] = [
    {"logprobs": 4, "top_k": 30, "top_p": 0.9},
    {"logprobs": 20, "top_k": 6, "repetition_penalty": 1.4, "bad_words": ((3,),)},
    {"logprobs": 3, "temperature": 0, "allowed_token_ids": [600]},
    {"logprobs": 2, "temperature": 3.0, "logit_bias": {599: 9.0, 2: 9.0}},
    {"logprobs": 3, "min_p": 0.1, "presence_penalty": 0.5},
    {"top_k": 128, "allowed_token_ids": list(range(290, 310))},
]


@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "ties"), (3, "holes"), (4, "plain")])
def test_ranks_sample_any_mix_of_rows_as_one_rank_does(num_ranks: int, kind: str) -> None:
    rng = np.random.default_rng(num_ranks)
    options = [*MIXTURE[num_ranks % 3 :: 3], *SPECIAL[num_ranks % 2 :: 2], *LOGPROBS]
    answers = sample(some_jobs(rng, kind, options), num_ranks)
    for rank in answers.ranks:
        check(rank, answers.one)
    _, logits, _ = answers.num_columns
    for option, num_logits in zip(options, [*logits[:3], *logits[4:]], strict=True):
        greedy, k = option.get("temperature") == 0, option.get("top_k", 0)
        assert (num_logits > 0) == (not greedy and not 0 < k <= 128 and bool(option.keys() & NEEDS_ALL))


def test_rows_transfer_only_what_their_parameters_need() -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"repetition_penalty": 1.3},
        {"top_k": 5},
        {"logprobs": 4},
        {"logprobs": 4, "top_k": 5},
        {"top_p": 0.5, "logprobs": 1},
    ]
    answers = sample(some_jobs(np.random.default_rng(0), "plain", options), 2)
    candidates, logits, counts = answers.num_columns
    assert candidates == [3, 3, 6 + 2 * 5, 0, 6 + 2 * 4, 6 + 2 * 4 + 3 * 5, 0]
    assert logits[:6] == [0] * 6
    assert logits[6] >= VOCAB
    assert counts == [0, 0, 0, 0, 2, 2, 0]


def test_rows_without_a_token_and_non_finite_rows_fail_on_every_rank() -> None:
    """It does not matter which rank has the non-finite logit, or whether all tokens of a rank are forbidden."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 4},
        {"allowed_token_ids": [3]},
        {"logprobs": 2, "allowed_token_ids": list(range(100)), "top_k": 6},
        {"temperature": 0, "allowed_token_ids": [590], "logprobs": 100},
        {"logprobs": 7, "top_k": 9},
    ]
    jobs = some_jobs(np.random.default_rng(5), "plain", options)
    jobs[0].logits[600] = np.nan
    jobs[1].logits[2] = np.inf
    jobs[2].logits[3] = -np.inf
    jobs[5].logits[:400] = -np.inf  # all of the first rank, and some of the second
    jobs[5].logits[405:] = -np.inf
    answers = sample(jobs, 3)
    assert answers.one.bad[:2] == [IS_NOT_FINITE] * 2
    assert answers.one.bad[2] == HAS_NO_TOKEN
    for rank in answers.ranks:
        assert rank.bad == answers.one.bad
        assert all(0 <= i < VOCAB for i in [*rank.ids[:3], *rank.ids[4:]])
        assert rank.ids[4:] == answers.one.ids[4:]
        for entry in (4, 5, 6):
            same_logprobs(rank.logprobs[entry], answers.one.logprobs[entry])
    assert answers.one.ids[5] == 590
