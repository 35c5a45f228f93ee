"""The numbers of a sampling row hold its request's parameters."""

from __future__ import annotations

import pytest

from inflight.errors import EngineError
from inflight.execution.sampling.sampler import SamplingRows
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams


def request(seed: int, **options: object) -> RequestSpec:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return Request.create("r", [1, 2, 3], params, max_tokens=9, seed=seed).current_spec()


ADMISSIONS = [
    (3, request(2**40 + 5, temperature=0.5, top_k=9, top_p=0.25, min_p=1.0)),
    (0, request(-1, temperature=0, min_tokens=4)),
    (5, request(7, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5, logprobs=2)),
    (2, request(8, top_k=1, temperature=1e300)),
]


def test_rows_hold_the_parameters() -> None:
    state = SamplingRows(7, 50)
    for row, admitted in ADMISSIONS:
        state.set(row, admitted)
    assert list(state[3].numbers) == [0.5, 0, 0.25, 1, 0, 0, 5, 256, 9, 3, 3, 0]
    assert state[0].numbers.min_length == 7
    assert [state[row].numbers.argmax for row in (0, 2, 3, 5)] == [True, True, False, False]
    assert state[2].numbers.temperature == 1e30
    assert state[0].numbers.seed_low == state[0].numbers.seed_high == -1
    assert (state[5].num_logprobs, state[5].penalises) == (2, True)
    with pytest.raises(EngineError, match="row 1"):
        state[1]
