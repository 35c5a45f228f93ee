"""The sampler against a float64 oracle, over random mixes of every parameter in one batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from inflight.sampling_params import SEED_RANGE, SamplingParams
from tests.execution.sampling.sampler_oracle import Bench, Job, acceptable, adjusted

pytestmark = pytest.mark.usefixtures("each_sampler")

VOCAB = 50
ids = st.integers(0, VOCAB - 1)
# Exact in float32: what ties in float64 ties in the sampler, and cuts among equals fall alike.
eighths = st.integers(-16, 16).map(lambda n: n / 8)


def off_or(value: object, strategy: SearchStrategy[object]) -> SearchStrategy[object]:
    return st.one_of(st.just(value), strategy)


@st.composite
def params(draw: DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-7, 0.3, 1.0, 2.5])),
        top_k=draw(off_or(0, st.integers(-1, VOCAB + 5))),  # type: ignore[arg-type]
        top_p=draw(off_or(1.0, st.floats(0.01, 1))),  # type: ignore[arg-type]
        min_p=draw(off_or(0.0, st.floats(0, 1))),  # type: ignore[arg-type]
        repetition_penalty=draw(off_or(1.0, st.sampled_from([0.5, 0.75, 1.5, 2.0]))),  # type: ignore[arg-type]
        frequency_penalty=draw(off_or(0.0, eighths)),  # type: ignore[arg-type]
        presence_penalty=draw(off_or(0.0, eighths)),  # type: ignore[arg-type]
        min_tokens=draw(st.integers(0, 6)),
        logit_bias=draw(off_or(None, st.dictionaries(ids, eighths, max_size=4))),  # type: ignore[arg-type]
        allowed_token_ids=draw(off_or(None, st.lists(ids, min_size=1, max_size=20))),  # type: ignore[arg-type]
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@st.composite
def jobs(draw: DrawFn) -> Job:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(scale=draw(st.sampled_from([0.5, 3.0])), size=VOCAB)
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    outputs = draw(st.lists(st.integers(0, 3), max_size=8))  # few ids, so that bad words match
    words = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    return Job(
        params=draw(params()),
        prompt=draw(st.lists(ids, min_size=1, max_size=8)),
        outputs=outputs,
        logits=logits.astype(np.float32),
        seed=draw(st.integers(*SEED_RANGE)),
        stop_ids=frozenset(draw(st.lists(ids, max_size=3))),
        bad_words=tuple(draw(st.lists(words, max_size=3))),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(jobs(), min_size=1, max_size=8))
def test_every_row_matches_the_oracle(batch: list[Job]) -> None:
    sampled = Bench(batch).sample()
    for job, token_id, bad in zip(batch, sampled.token_ids, sampled.bad, strict=True):
        nothing_left = bool(np.all(adjusted(job) == -np.inf))
        assert bool(bad) == nothing_left
        assert nothing_left or token_id in acceptable(job)


@settings(max_examples=30, deadline=None)
@given(st.lists(jobs(), min_size=2, max_size=8), st.randoms())
def test_row_depends_on_neither_neighbours_nor_their_order(batch: list[Job], random: object) -> None:
    together = Bench(batch).sample()
    order = list(range(len(batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = Bench(batch).sample(order)
    for entry, job in enumerate(batch):
        alone = Bench([job]).sample()
        assert alone.token_ids[0] == together.token_ids[entry] == shuffled.token_ids[order.index(entry)]
        assert alone.logprobs.get(0) == together.logprobs.get(entry)
        assert alone.bad[0] == together.bad[entry]
