"""Structured outputs are checked as far as possible without a model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inflight import SamplingParams, StructuredOutputs
from inflight.errors import ParameterError
from inflight.structured_outputs import MAX_CONSTRAINT_LENGTH

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing: give exactly one of json, regex, choice"),
        ({"regex": "a", "choice": ["b"]}, "has regex, choice: give exactly one"),
        ({"json_object": False}, "has nothing"),
        ({"json_object": 1.5}, "json_object is 1.5: it must be true or false"),
        ({"regex": ""}, "regex is '': it must be a non-empty string"),
        ({"grammar": 3}, "grammar is 3: it must be a non-empty string"),
        ({"choice": "yes"}, "choice is 'yes': it must be a list of texts"),
        ({"choice": []}, "choice has 0 texts: it must have 1 to"),
        ({"choice": ["a", ""]}, "choice has '': it must be a list of non-empty texts"),
        ({"json": [1]}, "json is \\[1\\]: it must be an object"),
        ({"json": {"const": float("nan")}}, "json is not JSON data"),
        ({"json": {"const": object()}}, "json is not JSON data"),
        ({"structural_tag": True}, "structural_tag is True: it must be an object"),
        ({"regex": "a" * (MAX_CONSTRAINT_LENGTH + 1)}, "regex has 131073 characters: at most"),
        ({"regex": "\ud800"}, "regex has a lone surrogate"),
    ],
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"


def test_sampling_params_accept_an_object_or_a_mapping() -> None:
    constraint = StructuredOutputs(json=SCHEMA)
    assert constraint.kind == "json"
    mapping: Any = {"json": SCHEMA}
    assert SamplingParams(structured_outputs=constraint) == SamplingParams(structured_outputs=mapping)
    with pytest.raises(ParameterError, match="structured_outputs has guided, jsn: allowed are json, regex"):
        SamplingParams(structured_outputs={"jsn": SCHEMA, "guided": 1})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="structured_outputs has answer: allowed are json, regex"):
        SamplingParams(structured_outputs={"answer": "{}"})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="structured_outputs is 'json': it must be StructuredOutputs"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"json": SCHEMA},
        {"json": True},
        {"choice": ["a", "é"]},
        {"json_object": True},
        {"structural_tag": SCHEMA},
    ],
)
def test_constraint_can_be_sent_to_another_process(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**fields))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert received == params
    assert received.structured_outputs is not None
    assert received.structured_outputs.text == StructuredOutputs(**fields).text
