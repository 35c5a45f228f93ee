"""Conversion of values that are not written as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.frontend.agents.values import bare_text_to_json, python_to_json, schema_types

TEXTS = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_python_repr_converts_to_equal_json(value: Any) -> None:
    converted = python_to_json(repr(value))
    assert converted is not None
    assert json.loads(converted) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1, 2,)", "[1, 2]"),
        ("'\\x41\\u00e9\\q\\\\'", '"Aé\\\\q\\\\"'),
        ("true", "true"),
        ("'\\ud800'", '"\\ud800"'),
        ("x + 1", None),
        ("f()", None),
        ("nan", None),
        ("1e", None),
        ("{1: 2}", None),
        ("'", None),
        ("", None),
        ("[" * 100_000, None),
        ("9" * 5000, None),
    ],
)
def test_python_literals_convert_to_json(text: str, expected: str | None) -> None:
    assert python_to_json(text) == expected


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("12", ["integer"], "12"),
        (" 12\n", ["number"], "12"),
        ("12", ["string"], '"12"'),
        ("12", [], "12"),
        ("twelve", ["integer"], '"twelve"'),
        ("1.5", ["integer"], '"1.5"'),
        ("True", ["boolean"], "true"),
        ("TRUE", ["boolean"], "true"),
        ("None", ["string", "null"], "null"),
        ("none of it", ["string", "null"], '"none of it"'),
        ('{"a": 1}', ["object"], '{"a": 1}'),
        ("['a']", ["array"], '["a"]'),
        ("NaN", ["number"], '"NaN"'),
        ('"a"', [], '"\\"a\\""'),
        ("", [], '""'),
    ],
)
def test_bare_text_converts_by_type(text: str, types: list[str], expected: str) -> None:
    assert bare_text_to_json(text, frozenset(types)) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null", 3]}, {"string", "null"}),
        ({"type": "float"}, {"number"}),
        ({"type": ["int", "bool"]}, {"integer", "boolean"}),
        ({"anyOf": [{"type": "Dict"}, {"type": "list"}]}, {"object", "array"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}]}, set()),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"const": None}, {"null"}),
        ({"enum": [1, True, 0.5, {}]}, {"integer", "boolean", "number", "object"}),
        ({}, set()),
        (True, set()),
        (None, set()),
        ({"type": 3, "anyOf": 3, "enum": 3}, set()),
    ],
)
def test_schema_types(schema: object, types: set[str]) -> None:
    assert schema_types(schema) == types
