"""The sampling kernels against the torch sampler: the same tokens for every mixture of plain rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.errors import EngineError
from inflight.events import PositionLogprobs, unpack_logprobs
from inflight.execution.sampling.interface import IS_NOT_FINITE
from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.execution.sampling.triton.sample import (
    LogprobBuffers,
    SamplingBatch,
    SamplingWorkspace,
    read_logprobs,
    sample_tokens,
    score_all,
)
from tests.execution.sampling.sampler_oracle import GARBAGE, Bench, Job, job

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = -5

MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "top_k": 7, "top_p": 0.5},
    {"temperature": 0.7},
    {"temperature": 1e300},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 2.5},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.3, "temperature": 1.7},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.05, "top_p": 0.5},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 5, "top_p": 0.4, "temperature": 3.0},
    {"top_k": 45, "top_p": 0.8, "min_p": 0.01, "temperature": 2.0},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.5},
]


SPECIAL: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "temperature": 0},
    {"frequency_penalty": 0.5, "top_p": 0.9},
    {"frequency_penalty": -1.0, "min_p": 0.1, "top_k": 9},
    {"logit_bias": {3: 5.0, 7: -100, 40: 2.0}},
    {"logit_bias": {i: float(i % 7 - 3) for i in range(0, 49, 2)}, "top_k": 5},
    {"allowed_token_ids": [1, 5, 9, 40, 41]},
    {"allowed_token_ids": [2], "temperature": 0},
    {"bad_words": ((3,), (1, 2), (4, 5, 6), (0, 1)), "top_p": 0.8},
    {"min_tokens": 16, "stop_ids": frozenset(range(0, 50, 2)), "temperature": 0.5},
    {"logprobs": 0},
    {"logprobs": 5, "temperature": 0},
    {
        "logprobs": 20,
        "repetition_penalty": 1.5,
        "allowed_token_ids": list(range(0, 50, 3)),
        "bad_words": ((6,), (3, 9)),
        "logit_bias": {12: 1.5},
        "top_p": 0.8,
    },
]


@dataclass
class Results:
    """The results of the kernels."""

    ids: list[int]
    bad: list[int]
    tokens: Tensor
    logprobs: dict[int, PositionLogprobs]  # by entry


class KernelBench:
    """Jobs in rows of the kernels, the same rows as those of a `Bench`."""

    def __init__(self, bench: Bench, group: int) -> None:
        self.bench = bench
        self.vocab_size = len(bench.jobs[0].logits)
        self.tokens = bench.tokens.to(DEVICE, copy=True)
        self.rows = TritonSamplingRows(bench.max_rows, self.vocab_size, DEVICE)
        requests = [(row, job.request()) for row, job in zip(bench.rows, bench.jobs, strict=True)]
        self.rows.set_many(requests, self.tokens)
        self.workspace = SamplingWorkspace.allocate(len(bench.jobs) + 2, self.vocab_size, DEVICE, group)

    def sample(self, entries: list[int]) -> Results:
        """Sample the next token of these jobs; -1 is a padding entry."""
        batch, logits, counts = self.inputs(entries)
        sample_tokens(logits, batch, self.rows, self.tokens, self.workspace)
        return self.results(batch, counts)

    def inputs(self, entries: list[int]) -> tuple[SamplingBatch, Tensor, list[int]]:
        """Return the batch, its logits, and the number of log-probabilities of each entry."""
        jobs, rows = self.bench.jobs, self.bench.rows
        nothing = np.full(self.vocab_size, np.nan, dtype=np.float32)
        logits = np.stack([jobs[i].logits if i >= 0 else nothing for i in entries])
        lengths = [len(jobs[i].token_ids) if i >= 0 else 0 for i in entries]
        counts = [int(self.rows._num_logprobs[rows[i]]) if i >= 0 else -1 for i in entries]
        batch = SamplingBatch(
            ints([rows[i] if i >= 0 else -1 for i in entries]),
            ints(lengths),
            ints([UNTOUCHED] * len(entries)),
            ints([UNTOUCHED] * len(entries)),
            logprob_buffers(counts),
        )
        return batch, torch.from_numpy(logits).to(DEVICE), counts

    def results(self, batch: SamplingBatch, counts: list[int]) -> Results:
        assert batch.logprobs is not None
        return Results(
            batch.ids.tolist(), batch.bad.tolist(), self.tokens.cpu(), unpack(batch.logprobs, counts)
        )


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def logprob_buffers(counts: list[int]) -> LogprobBuffers:
    places = np.cumsum([count >= 0 for count in counts]) - 1
    width = 1 + max(0, *counts)
    results = ints([UNTOUCHED] * (len(counts) * 3 * width))
    return LogprobBuffers(ints(counts), ints(places.tolist()), ints([width]), results)


def unpack(buffers: LogprobBuffers, counts: list[int]) -> dict[int, PositionLogprobs]:
    entries = [entry for entry, count in enumerate(counts) if count >= 0]
    positions = read_logprobs(
        buffers.results.cpu(), [counts[entry] for entry in entries], int(buffers.width.item())
    )
    return dict(zip(entries, positions, strict=True))


def sample_jobs(bench: Bench, entries: list[int], group: int) -> tuple[list[int], list[int], Tensor]:
    """Return ids, bad flags and the table of tokens after sampling these jobs; -1 is a padding entry."""
    actual = KernelBench(bench, group).sample(entries)
    return actual.ids, actual.bad, actual.tokens


def agree(jobs: list[Job], group: int) -> list[int]:
    """Check that the torch sampler and the kernels give the same tokens and log-probabilities."""
    bench = Bench(jobs, max_rows=len(jobs) + 1)
    reference = bench.sample()
    actual = KernelBench(bench, group).sample(list(range(len(jobs))))
    assert actual.ids == reference.token_ids
    assert actual.bad == reference.bad
    assert actual.logprobs.keys() == reference.logprobs.keys()
    for entry, position in actual.logprobs.items():
        candidates, expected = unpack_logprobs(position), unpack_logprobs(reference.logprobs[entry])
        assert [(t.token_id, t.rank) for t in candidates] == [(t.token_id, t.rank) for t in expected]
        assert [t.logprob for t in candidates] == pytest.approx([t.logprob for t in expected], abs=1e-5)
    return actual.ids


def some_logits(rng: np.random.Generator, vocab_size: int, kind: str) -> NDArray[np.float32]:
    x = rng.normal(scale=2.5, size=vocab_size)
    if kind == "ties":
        x = np.round(x) + 0.0 * rng.choice([-1, 1], vocab_size)  # zeros of both signs
    if kind == "holes":
        x[rng.random(vocab_size) < 0.7] = -np.inf
    if kind == "flat":
        x /= 1000
    return x.astype(np.float32)


@pytest.mark.parametrize(
    ("vocab_size", "group", "kind"),
    [
        (50, 8, "plain"),
        (600, 8, "ties"),
        (600, 8, "holes"),
        (1100, 16, "flat"),
        (3001, 64, "plain"),
    ],
)
def test_any_mix_of_rows_samples_what_the_torch_sampler_does(vocab_size: int, group: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size + group)
    jobs = [
        job(
            some_logits(rng, vocab_size, kind),
            prompt=[int(i) for i in rng.integers(0, vocab_size, 5)],
            outputs=[int(i) for i in rng.integers(0, 10, int(rng.integers(0, 12)))],
            seed=int(rng.integers(0, 2**62)),
            **options,
        )
        for options in (*MIXTURE, *SPECIAL)
    ]
    agree(jobs, group)


def test_lower_ids_of_equal_logits_are_allowed() -> None:
    flat = [-0.0, 0.0] * 300
    jobs = [job(flat, top_k=4, seed=seed) for seed in range(3)]
    jobs += [job(flat, top_k=4, top_p=0.5, seed=seed) for seed in range(3)]  # two of the four
    jobs += [job(flat, top_p=3.5 / 600, seed=seed) for seed in range(3)]
    ids = agree(jobs, 8)
    assert max(ids) < 4
    assert max(ids[3:6]) < 2
    assert len(set(ids)) > 1


def test_only_possible_token_is_sampled_with_any_parameters() -> None:
    alone = np.full(700, -np.inf)
    alone[613] = -3.0
    assert set(agree([job(alone, seed=i, **options) for i, options in enumerate(MIXTURE[::2])], 8)) == {613}


def test_non_finite_logits_fail_and_still_give_a_token() -> None:
    fine, nan, inf, nothing = (np.linspace(0, 1, 130) for _ in range(4))
    nan[17], inf[5], nothing[:] = np.nan, np.inf, -np.inf
    logits = [x for x in (fine, nan, inf, nothing) for _ in range(3)]
    options: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}]
    jobs = [job(x, **option) for x, option in zip(logits, options * 4, strict=True)]
    bench = Bench(jobs)
    ids, bad, tokens = sample_jobs(bench, list(range(12)), 8)
    assert bad == [0] * 3 + [IS_NOT_FINITE] * 9
    assert all(0 <= i < 130 for i in ids)
    assert [int(tokens[row, 1]) for row in bench.rows] == ids


def test_tokens_are_written_behind_the_row_and_padding_writes_nothing() -> None:
    rng = np.random.default_rng(1)
    jobs = [job(rng.normal(size=90), outputs=[1] * i, seed=i, top_p=0.7) for i in range(3)]
    bench = Bench(jobs)
    ids, bad, tokens = sample_jobs(bench, [2, -1, 0, 1, -1], 8)
    assert ids[1] == ids[4] == UNTOUCHED
    assert bad == [0, UNTOUCHED, 0, 0, UNTOUCHED]
    reference = bench.tokens.clone()
    for entry, token_id in ((2, ids[0]), (0, ids[2]), (1, ids[3])):
        reference[bench.rows[entry], 1 + entry] = token_id
        assert token_id != GARBAGE
    assert torch.equal(tokens, reference)


@pytest.mark.parametrize("shape", [(3, 512), (2, 513)])
def test_workspace_that_is_too_small_is_rejected(shape: tuple[int, int]) -> None:
    zeros = ints([0] * shape[0])
    rows, workspace = TritonSamplingRows(1, 512, DEVICE), SamplingWorkspace.allocate(2, 512, DEVICE, group=8)
    batch = SamplingBatch(zeros, zeros, zeros, zeros, logprob_buffers([-1] * shape[0]))
    with pytest.raises(EngineError, match="at most 2 x 512"):
        sample_tokens(torch.zeros(shape, device=DEVICE), batch, rows, zeros, workspace)


def test_steps_update_seen_and_forbidden_tokens() -> None:
    """Several tokens in a row, each compared with the torch sampler that knows all tokens before."""
    rng = np.random.default_rng(11)
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.8, "temperature": 0},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "seed": 3},
        {"bad_words": ((3,), (5, 4), (5, 5, 6), (6, 6)), "temperature": 0.7, "seed": 4},
        {"min_tokens": 3, "stop_ids": frozenset({1, 2, 5}), "temperature": 0},
        {"presence_penalty": -2.0, "logprobs": 2, "bad_words": ((2, 2), (7,)), "temperature": 0},
    ]
    jobs = [
        job(rng.normal(size=40), prompt=[1, 2, 3], outputs=[5, 5][:n], **o) for n, o in enumerate(options)
    ]
    kernels = KernelBench(Bench(jobs, max_rows=8), group=8)
    for _ in range(6):
        reference = Bench(jobs, max_rows=8).sample()
        assert kernels.sample(list(range(len(jobs)))).ids == reference.token_ids
        for each, token_id in zip(jobs, reference.token_ids, strict=True):
            each.outputs.append(token_id)


def test_many_ties_and_many_in_one_group_are_ranked_correctly() -> None:
    """There are more candidates than fit."""
    flat, heap = np.zeros(900), np.zeros(900)
    heap[:400] = np.linspace(5, 6, 400)
    jobs = [
        job(x, seed=i, top_k=k, logprobs=7) for x in (flat, heap) for i, k in enumerate((1, 30, 128, 300))
    ]
    agree(jobs, 64)


def test_logits_are_scored_without_sampling() -> None:
    rng = np.random.default_rng(12)
    for kind in ("plain", "ties"):
        logits = np.stack([some_logits(rng, 700, kind) for _ in range(6)])
        targets = [int(i) for i in rng.integers(0, 700, 6)]
        workspace = SamplingWorkspace.allocate(6, 700, DEVICE, group=8)
        count = 20 if kind == "plain" else 3
        actual = score_all(torch.from_numpy(logits).to(DEVICE), ints(targets), count, workspace)
        for entry, position in enumerate(read_logprobs(actual.cpu(), [count] * 6, 1 + count)):
            x = logits[entry].astype(np.float64)
            normalised = x - x.max() - np.log(np.exp(x - x.max()).sum())
            order = np.lexsort((np.arange(700), -x))[:count].tolist()
            ids = [targets[entry], *(i for i in order if i != targets[entry])]
            candidates = unpack_logprobs(position)
            assert [t.token_id for t in candidates] == ids
            assert [t.rank for t in candidates] == [1 + int((x > x[i]).sum()) for i in ids]
            assert [t.logprob for t in candidates] == pytest.approx([normalised[i] for i in ids], abs=1e-4)


def test_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(2)
    jobs = [
        job(some_logits(rng, 500, "ties"), seed=i, **options)
        for i, options in enumerate((*MIXTURE[::3], *SPECIAL[::2]))
    ]
    bench = Bench(jobs, max_rows=16)
    together, _, _ = sample_jobs(bench, list(range(len(jobs))), 8)
    backwards, _, _ = sample_jobs(bench, [-1, *reversed(range(len(jobs)))], 8)
    assert backwards[1:] == together[::-1]
    for entry in (1, 5, 8):
        assert sample_jobs(bench, [entry], 8)[0] == [together[entry]]


@pytest.mark.parametrize(("options", "kept"), [({"temperature": 0.8}, 8), ({"top_p": 0.8}, 3)])
def test_samples_follow_the_distribution(options: dict[str, Any], kept: int) -> None:
    logits = np.array([0.0, 2.0, -1.0, 1.5, 0.25, -3.0, 1.0, -0.5])
    num = 4096 if DEVICE == "cuda" else 64
    bench = Bench([job(logits, seed=seed, **options) for seed in range(num)], max_rows=num)
    ids, _, _ = sample_jobs(bench, list(range(num)), 4)
    probs = np.exp(logits / options.get("temperature", 1.0))
    probs[np.argsort(-logits)[kept:]] = 0
    expected = num * probs / probs.sum()
    counts = np.bincount(ids, minlength=8)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < 30  # at most 7 degrees of freedom: p = 0.0001
