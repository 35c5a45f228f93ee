"""Bit for bit, a row does not know its neighbours: at sizes where work is split over threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inflight.layers.native.library import native_library
from tests.execution.sampling.sampler_oracle import Bench, Job, job

pytestmark = pytest.mark.usefixtures("each_sampler")

VOCAB = 40_000
OPTIONS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.3, "min_p": 0.01},
    {"top_k": 20},
    {"top_k": 300, "top_p": 0.7, "min_p": 0.001},
    {"top_k": 10_000, "top_p": 0.9},
    {"top_p": 0.4},
    {"top_p": 0.95, "temperature": 2.0},  # too flat for the first candidates
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.5},
    {"logit_bias": {5: 3.0, 39_999: -4.0}, "bad_words": ((9, 7), (3,)), "logprobs": 20},
    {"allowed_token_ids": range(0, VOCAB, 7), "min_tokens": 15, "stop_ids": frozenset({0, 7}), "logprobs": 0},
]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def mixed_jobs(seed: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [
        job(
            rng.normal(scale=2, size=VOCAB),
            prompt=rng.integers(0, VOCAB, 20).tolist(),
            outputs=rng.integers(0, 10, 12).tolist(),
            seed=int(rng.integers(0, 2**62)),
            **options,
        )
        for options in OPTIONS
    ]


@pytest.mark.parametrize("seed", range(2))
def test_mixed_batch_equals_its_rows_alone(seed: int) -> None:
    bench = Bench(mixed_jobs(seed))
    together = bench.sample()
    for entry in range(len(bench.jobs)):
        alone = bench.sample([entry])
        assert alone.token_ids == [together.token_ids[entry]]
        assert alone.logprobs.get(0) == together.logprobs.get(entry)
    backwards = bench.sample(range(len(bench.jobs))[::-1])
    assert backwards.token_ids == together.token_ids[::-1]


def test_result_does_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(mixed_jobs(7))
    expected = bench.sample()
    torch.set_num_threads(1)
    library = native_library()
    if library is not None:
        monkeypatch.setattr(library, "threads", 1 if library.threads > 1 else 3)
    assert bench.sample() == expected
