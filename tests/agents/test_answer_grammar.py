"""Whatever is drawn under the grammar of an answer, a parser reads valid calls in it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from inflight import StructuredOutputs
from inflight.agents import TOOL_FORMATS, ParsedMessage
from inflight.agents.thinking import THINKING

from .answers import Model

PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}}},
    "required": ["lat"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"$ref": "#/$defs/unit"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "place": PLACE,
                    "note": {"type": ["string", "null"]},
                    "level": {"enum": ["low", 3, None]},
                    "code": {"type": "string", "minLength": 2, "maxLength": 4},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
                "$defs": {"unit": {"type": "string", "enum": ["celsius", "37"]}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
NAMED = type("NamedTool", (), {"name": "get_weather"})()


def model(tool_format: str | None, reasoning: str | None, special: bool) -> Model:
    markers = TOOL_FORMATS.get(tool_format).markers if tool_format else ()
    thinking = THINKING.get(reasoning or "")
    return Model.with_markers((*markers, *((thinking.open, thinking.close) if thinking else ())), special)


def check_calls(message: ParsedMessage) -> None:
    for call in message.tool_calls:
        assert call.complete
        jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


# Formats with the reasoning that their models have, and whether their markers are special tokens.
FORMATS = [
    ("hermes", "think", False),
    ("hermes", "seed_oss", True),
    ("harmony", "harmony", True),
]


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_required_calls_are_valid(tool_format: str, reasoning: str | None, special: bool) -> None:
    some = model(tool_format, reasoning, special)
    counts, thought = set(), False
    for seed in range(16):
        message = some.answer(seed, tool_format, reasoning, TOOLS, tool_choice="required")
        assert message.tool_calls
        assert not message.content
        check_calls(message)
        counts.add(len(message.tool_calls))
        thought |= bool(message.reasoning)
    assert thought or reasoning is None
    assert len(counts) > 1 or tool_format == "harmony"  # which ends with a call


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_one_call_of_the_tool_that_was_named(tool_format: str, reasoning: str | None, special: bool) -> None:
    some = model(tool_format, reasoning, special)
    for seed in range(4):
        message = some.answer(seed, tool_format, reasoning, TOOLS, tool_choice=NAMED, parallel=False)
        assert [call.name for call in message.tool_calls] == ["get_weather"]
        check_calls(message)


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_strict_tools_may_be_called_and_then_calls_are_valid(
    tool_format: str, reasoning: str | None, special: bool
) -> None:
    some = model(tool_format, reasoning, special)
    messages = [some.answer(seed, tool_format, reasoning, TOOLS) for seed in range(16)]
    for message in messages:
        check_calls(message)
    assert any(message.tool_calls for message in messages)
    assert any(message.content for message in messages)


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_calls_or_content_of_a_shape(tool_format: str, reasoning: str | None, special: bool) -> None:
    some = model(tool_format, reasoning, special)
    content = StructuredOutputs(json=PLACE)
    messages = [some.answer(seed, tool_format, reasoning, TOOLS, content=content) for seed in range(16)]
    for message in messages:
        check_calls(message)
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), PLACE)
    assert len({bool(message.tool_calls) for message in messages}) == 2
