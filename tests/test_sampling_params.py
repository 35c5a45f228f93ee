from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import ParameterError
from inflight.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

NAN, INF = float("nan"), float("inf")

BAD: dict[str, list[Any]] = {
    "n": [0, -1, MAX_N + 1, 1.0, True, "1", None],
    "temperature": [10**400, -0.1, NAN, INF, -INF, "1", None, True],
    "top_p": [0, -0.5, 1.01, NAN, "1"],
    "top_k": [-2, 1.5, None, True],
    "min_p": [-0.1, 1.1, NAN],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, INF],
    "repetition_penalty": [0, -1, 1e7, NAN],
    "seed": [-(2**63) - 1, 2**64, 1.5, "1", True],
    "max_tokens": [0, -1, 1.5, NAN, "1", True],
    "min_tokens": [-1, 1.5, None],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.5, True],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, "1"],
    "stop": [
        5,
        {"a": 1},
        "",
        [""],
        ["a", ""],
        [5],
        ["x" * (MAX_STOP_LENGTH + 1)],
        ["a"] * (MAX_STOP_STRINGS + 1),
    ],
    "stop_token_ids": [5, [-1], ["1"], [1.5], [True]],
    "allowed_token_ids": [5, [], [-1], ["1"], [1.5]],
    "logit_bias": [
        [1, 2],
        {1.5: 1},
        {INF: 1},
        {True: 1},
        {-1: 1},
        {1: NAN},
        {1: INF},
        {1: 100.5},
        {1: "1"},
        {"x": 1},
        {"\u0665": 1},  # a digit, but not one that JSON numbers have
        {"9" * 5000: 1},
        {None: 1},
    ],
    "bad_words": ["abc", 5, [""], [5], ["a"] * 2000],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_error_names_the_value_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    words = {"stop": "stop", "logit_bias": "logit_bias", "bad_words": "bad_words"}
    assert words.get(name, name) in str(caught.value)


def test_error_has_the_value_and_the_allowed_range() -> None:
    with pytest.raises(ParameterError, match=r"^top_p is 1\.5: it must be in \(0, 1\]$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ParameterError, match=r"^max_tokens is 0: it must be an integer of at least 1$"):
        SamplingParams(max_tokens=0)


def test_min_tokens_fit_in_max_tokens() -> None:
    with pytest.raises(ParameterError, match="min_tokens is 6: it must not exceed max_tokens, 5"):
        SamplingParams(max_tokens=5, min_tokens=6)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_stop_strings_need_text() -> None:
    with pytest.raises(ParameterError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_equivalent_forms_are_normalized() -> None:
    assert SamplingParams(stop="abc").stop_strings == ("abc",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(allowed_token_ids=[3, 1]).allowed_token_ids == (3, 1)
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == (0, 1)


def test_params_can_be_replaced() -> None:
    params = SamplingParams(stop="x", logit_bias={3: 1.0})
    assert dataclasses.replace(params, n=2).stop_strings == ("x",)
    assert dataclasses.replace(params) == params
    with pytest.raises(ParameterError):
        dataclasses.replace(params, n=0)


def test_assignments_are_checked_and_wrong_ones_change_nothing() -> None:
    params = SamplingParams(stop="x", max_tokens=8)
    params.stop, params.top_k, params.min_tokens = ["y", "z"], -1, 4
    assert (params.stop_strings, params.top_k, params.min_tokens) == (("y", "z"), 0, 4)
    before = params.clone()
    for name, value in (("n", 0), ("max_tokens", 3), ("stop", ""), ("logit_bias", {1: 1000}), ("best_of", 3)):
        with pytest.raises(ParameterError):
            setattr(params, name, value)
    with pytest.raises(TypeError):
        params.colour = "red"
    assert params == before


@pytest.mark.parametrize("bias", [None, {3: 1.0}])
def test_clone_is_independent(bias: dict[int, float] | None) -> None:
    params = SamplingParams(temperature=0.5, logit_bias=bias)
    clone = params.clone()
    assert clone == params
    params.temperature = 0.7
    if params.logit_bias is not None:
        cast("dict[int, float]", params.logit_bias)[4] = 2.0
    assert (clone.temperature, clone.logit_bias) == (0.5, bias)


def test_clone_checks_changed_dicts() -> None:
    params = SamplingParams(logit_bias={3: 1.0})
    cast("dict[int, float]", params.logit_bias)[4] = 1000.0
    with pytest.raises(ParameterError, match="logit_bias"):
        params.clone()


@given(
    temperature=st.floats(0, 1e300),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 10**12),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 10**12),
)
def test_all_values_in_range_are_accepted(**fields: Any) -> None:
    params = SamplingParams(**fields)
    assert params.greedy == (fields["temperature"] == 0)
    assert params.top_k >= 0
    assert dataclasses.replace(params) == params
