"""The columns of a sampling row hold its request's parameters."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import EngineError
from inflight.execution.sampling import SamplingRows
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = ["temperature", "log_min_p", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
INTS = ["seed_low", "seed_high", "top_k", "num_prompt_tokens", "min_length", "argmax"]
COLUMNS = FLOATS + INTS


def request(seed: int, **options: object) -> RequestSpec:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return Request.create("r", [1, 2, 3], params, max_tokens=9, seed=seed).current_spec()


def numbers(state: SamplingRows) -> dict[str, list[float]]:
    return {name: getattr(state, name).tolist() for name in COLUMNS}


ADMISSIONS = [
    (3, request(2**40 + 5, temperature=0.5, top_k=9, top_p=0.25, min_p=1.0)),
    (0, request(-1, temperature=0, min_tokens=4)),
    (5, request(7, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5, logprobs=2)),
    (2, request(8, top_k=1, temperature=1e300)),
]


def test_row_columns_hold_the_parameters() -> None:
    state = SamplingRows(7, 50, DEVICE)
    for row, admitted in ADMISSIONS:
        state.set(row, admitted)
    actual = numbers(state)
    assert [actual[name][3] for name in COLUMNS] == [0.5, 0, 0.25, 1, 0, 0, 5, 256, 9, 3, 3, 0]
    assert actual["min_length"][0] == 7
    assert [actual["argmax"][row] for row in (0, 2, 3, 5)] == [1, 1, 0, 0]
    assert actual["temperature"][2] == pytest.approx(1e30)
    assert actual["seed_low"][0] == actual["seed_high"][0] == -1
    assert [actual[name][1] for name in COLUMNS] == [0] * len(COLUMNS)
    assert state.traits(5).logprobs == 2
    with pytest.raises(EngineError, match="row 1"):
        state.traits(1)
