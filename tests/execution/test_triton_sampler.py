"""The sampling kernels against the torch sampler: the same tokens for every mixture of plain rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.sampling.triton import SamplingWorkspace, draw, is_plain
from tests.execution.sampler_oracle import GARBAGE, Bench, Job, job

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


def draw_jobs(
    bench: Bench, entries: list[int], group: int, dtype: torch.dtype = torch.float32
) -> tuple[list[int], list[bool], Tensor]:
    """Ids, bad flags and the table of tokens after the kernels drew for these jobs; -1 is a padding entry."""
    vocab_size = len(bench.jobs[0].logits)
    nothing = np.full(vocab_size, np.nan, dtype=np.float32)
    logits = np.stack([bench.jobs[i].logits if i >= 0 else nothing for i in entries])
    rows = [bench.rows[i] if i >= 0 else -1 for i in entries]
    lengths = [len(bench.jobs[i].token_ids) if i >= 0 else 0 for i in entries]
    tokens = bench.tokens.to(DEVICE, copy=True)
    out_ids = torch.full((len(entries),), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    out_bad = torch.ones(len(entries), dtype=torch.bool, device=DEVICE)
    draw(
        torch.from_numpy(logits).to(DEVICE, dtype),
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        bench.state,
        tokens,
        out_ids,
        out_bad,
        SamplingWorkspace.allocate(len(entries) + 1, vocab_size, DEVICE, group),
    )
    return out_ids.tolist(), out_bad.tolist(), tokens.cpu()


def agree(jobs: list[Job], group: int, dtype: torch.dtype = torch.float32) -> list[int]:
    bench = Bench(jobs, max_rows=len(jobs) + 1, device=DEVICE)
    wanted = bench.sample().to_host()
    ids, bad, _ = draw_jobs(bench, list(range(len(jobs))), group, dtype)
    assert ids == wanted.token_ids
    assert bad == wanted.bad
    return ids


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
def test_any_mixture_of_rows_draws_what_the_torch_sampler_draws(
    vocab_size: int, group: int, kind: str
) -> None:
    rng = np.random.default_rng(vocab_size + group)
    jobs = [
        job(
            some_logits(rng, vocab_size, kind),
            outputs=[0] * int(rng.integers(0, 20)),
            seed=int(rng.integers(0, 2**62)),
            **options,
        )
        for options in MIXTURE
    ]
    agree(jobs, group)


def test_bfloat16_logits_draw_what_the_same_numbers_in_float32_draw() -> None:
    rng = np.random.default_rng(5)
    jobs = []
    for seed, options in enumerate(MIXTURE):
        logits = torch.from_numpy(some_logits(rng, 300, "plain")).bfloat16().float().numpy()
        jobs.append(job(logits, seed=seed, **options))
    agree(jobs, 16, torch.bfloat16)


def test_of_equal_logits_the_lower_ids_are_allowed() -> None:
    flat = [-0.0, 0.0] * 300
    jobs = [job(flat, top_k=4, seed=seed) for seed in range(3)]
    jobs += [job(flat, top_k=4, top_p=0.5, seed=seed) for seed in range(3)]  # two of the four
    jobs += [job(flat, top_p=3.5 / 600, seed=seed) for seed in range(3)]
    ids = agree(jobs, 8)
    assert max(ids) < 4
    assert max(ids[3:6]) < 2
    assert len(set(ids)) > 1


def test_one_possible_token_is_drawn_however_it_is_asked_for() -> None:
    alone = np.full(700, -np.inf)
    alone[613] = -3.0
    assert set(agree([job(alone, seed=i, **options) for i, options in enumerate(MIXTURE[::2])], 8)) == {613}


def test_logits_that_are_not_finite_are_bad_and_still_give_a_token() -> None:
    fine, nan, inf, nothing = (np.linspace(0, 1, 130) for _ in range(4))
    nan[17], inf[5], nothing[:] = np.nan, np.inf, -np.inf
    logits = [x for x in (fine, nan, inf, nothing) for _ in range(3)]
    options: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}]
    jobs = [job(x, **option) for x, option in zip(logits, options * 4, strict=True)]
    bench = Bench(jobs, device=DEVICE)
    ids, bad, tokens = draw_jobs(bench, list(range(12)), 8)
    assert bad == [False] * 3 + [True] * 9
    assert all(0 <= i < 130 for i in ids)
    assert [int(tokens[row, 1]) for row in bench.rows] == ids


def test_tokens_are_written_behind_the_row_and_padding_writes_nothing() -> None:
    rng = np.random.default_rng(1)
    jobs = [job(rng.normal(size=90), outputs=[1] * i, seed=i, top_p=0.7) for i in range(3)]
    bench = Bench(jobs, device=DEVICE)
    ids, bad, tokens = draw_jobs(bench, [2, -1, 0, 1, -1], 8)
    assert ids[1] == ids[4] == UNTOUCHED
    assert bad == [False, True, False, False, True]  # where it stayed True nothing was written
    wanted = bench.tokens.clone()
    for entry, drawn in ((2, ids[0]), (0, ids[2]), (1, ids[3])):
        wanted[bench.rows[entry], 1 + entry] = drawn
        assert drawn != GARBAGE
    assert torch.equal(tokens, wanted)


@pytest.mark.parametrize("shape", [(3, 512), (2, 513)])
def test_a_workspace_that_is_too_small_is_refused(shape: tuple[int, int]) -> None:
    bench = Bench([job(np.zeros(512))], device=DEVICE)
    rows = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    workspace = SamplingWorkspace.allocate(2, 512, DEVICE, group=8)
    with pytest.raises(EngineError, match="at most 2 x 512"):
        draw(torch.zeros(shape, device=DEVICE), rows, rows, bench.state, bench.tokens, rows, rows, workspace)


def test_a_row_does_not_know_its_neighbours() -> None:
    rng = np.random.default_rng(2)
    jobs = [job(some_logits(rng, 500, "ties"), seed=i, **options) for i, options in enumerate(MIXTURE[::2])]
    bench = Bench(jobs, max_rows=16, device=DEVICE)
    together, _, _ = draw_jobs(bench, list(range(len(jobs))), 8)
    backwards, _, _ = draw_jobs(bench, [-1, *reversed(range(len(jobs)))], 8)
    assert backwards[1:] == together[::-1]
    for entry in (1, 5, 8):
        assert draw_jobs(bench, [entry], 8)[0] == [together[entry]]


@pytest.mark.parametrize(("options", "kept"), [({"temperature": 0.8}, 8), ({"top_p": 0.8}, 3)])
def test_draws_follow_the_distribution(options: dict[str, Any], kept: int) -> None:
    logits = np.array([0.0, 2.0, -1.0, 1.5, 0.25, -3.0, 1.0, -0.5])
    num = 4096 if DEVICE == "cuda" else 64
    bench = Bench([job(logits, seed=seed, **options) for seed in range(num)], max_rows=num, device=DEVICE)
    ids, _, _ = draw_jobs(bench, list(range(num)), 4)
    probs = np.exp(logits / options.get("temperature", 1.0))
    probs[np.argsort(-logits)[kept:]] = 0
    expected = num * probs / probs.sum()
    counts = np.bincount(ids, minlength=8)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < 30  # at most 7 degrees of freedom: p = 0.0001


def test_only_rows_that_want_nothing_but_a_draw_are_plain() -> None:
    special: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1]},
        {"logprobs": 0},
        {"bad_words": ((1,),)},
        {"min_tokens": 2, "stop_ids": frozenset({3})},
    ]
    jobs = [job(np.zeros(8), **options) for options in [*special, *MIXTURE]]
    bench = Bench(jobs, max_rows=len(jobs), device=DEVICE)
    plain = [is_plain(bench.state.traits(row)) for row in bench.rows]
    assert plain == [False] * len(special) + [True] * len(MIXTURE)
    assert bench.state.special_rows == set(bench.rows[: len(special)])
    bench.state.clear(bench.rows[0])
    bench.state.set(bench.rows[1], jobs[-1].request())
    assert bench.state.special_rows == set(bench.rows[2 : len(special)])
