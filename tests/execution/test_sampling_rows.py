"""Admitting requests to rows one by one and many at once."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import EngineError
from inflight.execution.sampling import SamplingRows
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling import RowRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = ["temperature", "log_min_p", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
INTS = ["seed_low", "seed_high", "top_k", "num_prompt_tokens", "min_length", "argmax"]
COLUMNS = FLOATS + INTS


def request(seed: int, **options: object) -> RowRequest:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return RowRequest.of(Request("r", [1, 2, 3], params, max_tokens=9, seed=seed))


def numbers(state: SamplingRows) -> dict[str, list[float]]:
    return {name: getattr(state, name).tolist() for name in COLUMNS}


ADMISSIONS = [
    (3, request(2**40 + 5, temperature=0.5, top_k=9, top_p=0.25, min_p=1.0)),
    (0, request(-1, temperature=0, min_tokens=4)),
    (5, request(7, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5, logprobs=2)),
    (2, request(8, top_k=1, temperature=1e300)),
]


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    one_by_one, together = SamplingRows(7, 50, DEVICE), SamplingRows(7, 50, DEVICE)
    for row, admitted in ADMISSIONS:
        one_by_one.set(row, admitted)
    together.set_many([])
    assert together.version == 0
    together.set_many(ADMISSIONS)
    assert together.version > 0
    assert numbers(together) == numbers(one_by_one)
    assert together.special_rows == one_by_one.special_rows == {5}
    assert together.traits(5).logprobs == 2
    with pytest.raises(EngineError, match="row 1"):
        together.traits(1)


def test_columns_hold_what_was_asked() -> None:
    state = SamplingRows(7, 50, DEVICE)
    state.set_many(ADMISSIONS)
    found = numbers(state)
    assert [found[name][3] for name in COLUMNS] == [0.5, 0, 0.25, 1, 0, 0, 5, 256, 9, 3, 3, 0]
    assert found["min_length"][0] == 7
    assert [found["argmax"][row] for row in (0, 2, 3, 5)] == [1, 1, 0, 0]
    assert found["temperature"][2] == pytest.approx(1e30)
    assert found["seed_low"][0] == found["seed_high"][0] == -1
    assert [found[name][1] for name in COLUMNS] == [0] * len(COLUMNS)


def test_of_two_requests_for_a_row_the_last_has_it() -> None:
    state = SamplingRows(4, 50, DEVICE)
    state.set_many([(1, request(4, temperature=0.1)), (0, request(5)), (1, request(6, temperature=0.25))])
    assert state.temperature.tolist() == [1, 0.25, 0, 0]
    assert state.seed_low.tolist() == [5, 6, 0, 0]
