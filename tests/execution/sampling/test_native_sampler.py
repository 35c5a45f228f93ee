"""The compiled sampler where it works differently from the torch one: blocks, bits, pruned noise, memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inflight.errors import EngineError
from inflight.events import unpack_logprobs
from inflight.execution.sampling.interface import HAS_NO_TOKEN, IS_NOT_FINITE, Samples, token_bits
from inflight.execution.sampling.native import ROW, NativeSampler, cpu_sampler
from inflight.layers.native.library import native_library
from tests.execution.sampling.sampler_oracle import Bench, Job, acceptable, adjusted, job

# Some values for each parameter; ids are taken modulo the vocabulary.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1e300},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.6, "temperature": 1.5},
    {"top_k": 1},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 700, "top_p": 0.9, "min_p": 0.001, "temperature": 2.0},
    {"top_p": 0.05, "temperature": 3.0},
    {"top_p": 0.99},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -0.5, "top_p": 0.9},
    {"logit_bias": {0: 3.0, 700: -4.0}, "bad_words": ((9, 7), (3,)), "logprobs": 3},
    {"allowed_token_ids": range(0, 4000, 3), "min_tokens": 15, "stop_ids": (0, 6), "logprobs": 0},
    {"allowed_token_ids": range(1, 4000, 2), "top_p": 0.5, "repetition_penalty": 0.5, "logprobs": 7},
]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if native_library() is None:
        pytest.skip("nothing can be compiled here")


def sample_with(kind: str, jobs: list[Job]) -> Samples:
    return Bench(jobs, max_rows=len(jobs), kind=kind).sample()


def make_job(vocab: int, options: dict[str, Any], rng: np.random.Generator, logits: NDArray[Any]) -> Job:
    fields = dict(options)
    if "logit_bias" in fields:
        fields["logit_bias"] = {i % vocab: bias for i, bias in fields["logit_bias"].items()}
    if "bad_words" in fields:
        fields["bad_words"] = tuple(tuple(i % vocab for i in word) for word in fields["bad_words"])
    if "stop_ids" in fields:
        fields["stop_ids"] = frozenset(i % vocab for i in fields["stop_ids"])
    return job(
        logits,
        prompt=rng.integers(0, vocab, 20).tolist(),
        outputs=rng.integers(0, min(vocab, 10), 12).tolist(),
        seed=int(rng.integers(0, 2**62)),
        **fields,
    )


@pytest.mark.parametrize("vocab", [1, 2, 17, 50, 127, 128, 129, 1000, 3001])
@pytest.mark.parametrize("shape", ["spread", "ties", "flat"])
def test_every_parameter_at_odd_sizes_matches_the_oracle(vocab: int, shape: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = {
        "spread": rng.normal(scale=3, size=vocab),
        "ties": np.round(rng.normal(size=vocab)),
        "flat": np.zeros(vocab),
    }[shape]
    jobs = [make_job(vocab, options, rng, logits) for options in OPTIONS for _ in range(3)]
    sampled = sample_with("native", jobs)
    for one, token_id, bad in zip(jobs, sampled.token_ids, sampled.bad, strict=True):
        nothing_left = bool(np.all(adjusted(one) == -np.inf))
        assert bad == (HAS_NO_TOKEN if nothing_left else 0)
        assert 0 <= token_id < vocab
        assert nothing_left or token_id in acceptable(one), one.params


def test_large_vocabulary_matches_the_oracle() -> None:
    rng = np.random.default_rng(3)
    jobs = [make_job(151_936, o, rng, rng.normal(scale=3, size=151_936)) for o in OPTIONS[:-2]]
    jobs.append(
        make_job(151_936, {"allowed_token_ids": range(0, 160_000, 99), "top_p": 0.9}, rng, jobs[0].logits)
    )
    sampled = sample_with("native", jobs)
    assert not any(sampled.bad)
    for one, token_id in zip(jobs, sampled.token_ids, strict=True):
        assert token_id in acceptable(one), one.params


@pytest.mark.parametrize("vocab", [5, 130, 2000])
def test_tokens_and_logprobs_match_the_torch_sampler(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    jobs = [
        make_job(vocab, options, rng, rng.normal(scale=scale, size=vocab))
        for options in OPTIONS
        for scale in (0.3, 2.0, 8.0)
        for _ in range(6)
    ]
    native, torch_ = sample_with("native", jobs), sample_with("torch", jobs)
    assert native.bad == torch_.bad
    assert [t for t, bad in zip(native.token_ids, native.bad, strict=True) if not bad] == [
        t for t, bad in zip(torch_.token_ids, torch_.bad, strict=True) if not bad
    ]
    assert native.logprobs.keys() == torch_.logprobs.keys()
    for entry, actual in native.logprobs.items():
        if not native.bad[entry]:
            candidates, expected = unpack_logprobs(actual), unpack_logprobs(torch_.logprobs[entry])
            assert [(c.token_id, c.rank) for c in candidates] == [(c.token_id, c.rank) for c in expected]
            assert [c.logprob for c in candidates] == pytest.approx([c.logprob for c in expected], abs=2e-6)


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3, 0.05, 1.0, 40.0, 1e30])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 10.0, 1e4])
def test_pruning_never_drops_the_winner(temperature: float, scale: float) -> None:
    rng = np.random.default_rng(8)
    logits = rng.normal(scale=scale, size=1500) + rng.choice([-50.0, 0.0, 300.0])
    jobs = [job(logits, temperature=temperature, seed=seed) for seed in range(40)]
    assert sample_with("native", jobs).token_ids == sample_with("torch", jobs).token_ids


def test_row_is_the_same_in_any_batch_and_with_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    jobs = [make_job(40_000, o, rng, rng.normal(scale=2, size=40_000)) for o in OPTIONS]
    library = native_library()
    assert library is not None
    monkeypatch.setattr(library, "threads", 1)
    expected = sample_with("native", jobs)
    for threads in (2, 5):
        library.threads = threads
        assert sample_with("native", jobs) == expected
        actual = sample_with("native", jobs[::-1])
        assert actual.token_ids == expected.token_ids[::-1]
        last = len(jobs) - 1
        assert {last - entry: scores for entry, scores in actual.logprobs.items()} == expected.logprobs


@pytest.mark.parametrize("vocab", [31, 32, 33, 200])
def test_mask_allows_exactly_its_tokens(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=vocab)
    jobs = [job(logits, temperature=0, allowed_token_ids=[i]) for i in range(vocab)]
    jobs += [
        job(logits, temperature=1e5, seed=i, allowed_token_ids=[i, vocab - 1, 10**9]) for i in range(vocab)
    ]
    actual = sample_with("native", jobs)
    assert actual.token_ids[:vocab] == list(range(vocab))
    assert all(token in (i, vocab - 1) for i, token in enumerate(actual.token_ids[vocab:]))


def test_bits_are_in_words_the_lowest_first() -> None:
    words = token_bits([0, 5, 31, 32, 69, 70, -1, 10**6], 70)
    assert words.dtype == np.int32
    assert [int(word) & 0xFFFFFFFF for word in words] == [1 | 1 << 5 | 1 << 31, 1, 1 << 5]


def test_tokens_with_minus_inf_logits_are_listed_last_and_only_on_request() -> None:
    logits = [-math.inf] * 300
    logits[7], logits[290] = 1.0, 2.0
    (few,) = sample_with("native", [job(logits, temperature=0, logprobs=2)]).logprobs.values()
    assert [(c.token_id, c.rank) for c in unpack_logprobs(few)] == [(290, 1), (7, 2)]
    (more,) = sample_with("native", [job(logits, temperature=0, logprobs=4)]).logprobs.values()
    candidates = unpack_logprobs(more)
    assert [(c.token_id, c.rank) for c in candidates] == [(290, 1), (7, 2), (0, 3), (1, 3)]
    assert candidates[2].logprob == -math.inf
    assert sample_with("native", [job(logits, top_k=50, top_p=0.9)]).token_ids[0] in (7, 290)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logprobs_of_non_finite_logits_name_valid_tokens(poison: float) -> None:
    jobs = [job([poison, 1.0, 2.0], logprobs=2), job([0.0, 1.0, 2.0], temperature=0, logprobs=2)]
    sampled = sample_with("native", jobs)
    assert (sampled.token_ids, sampled.bad) == ([0, 2], [IS_NOT_FINITE, 0])
    candidates = unpack_logprobs(sampled.logprobs[0])
    assert [c.token_id for c in candidates] == [0, 1]
    assert all(math.isnan(c.logprob) for c in candidates)
    sampler = cpu_sampler(1, 3)
    actual = sampler.score_prompt(torch.tensor([[poison, 1.0, 2.0]]), torch.tensor([2]), 1)
    assert [c.token_id for c in unpack_logprobs(actual[0])] == [2, 0]


def test_logits_and_tokens_of_another_layout_are_rejected() -> None:
    bench = Bench([job([0.0, 1.0, 2.0])], kind="native")
    lengths = torch.tensor([1])
    good = torch.zeros(1, 3)
    for logits in (good.double(), torch.zeros(1, 6)[:, ::2], torch.zeros(1, 4)):
        with pytest.raises(EngineError, match="logits are"):
            bench.sampler.sample(logits, bench.rows, lengths, bench.tokens)
    with pytest.raises(EngineError, match="tokens are"):
        bench.sampler.sample(good, bench.rows, lengths, bench.tokens.long())


def test_cpu_uses_the_compiled_sampler_and_its_row_layout() -> None:
    assert isinstance(cpu_sampler(2, 8), NativeSampler)
    assert ROW.itemsize == 112
