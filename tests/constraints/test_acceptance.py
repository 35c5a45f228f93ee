"""No text that a schema forbids is accepted, however it is spelled."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from inflight import StructuredOutputs
from inflight.errors import ParameterError
from tests.constraints.walking import compiler, vocabulary, walk

OBJECT, ARRAY, STRING, INTEGER = ({"type": kind} for kind in ("object", "array", "string", "integer"))
NUMBER = {"type": "number"}
A_INTEGER = {"properties": {"a": INTEGER}}
OTHERS_ARE_TEXTS = {**OBJECT, **A_INTEGER, "additionalProperties": STRING}

# The first text of each case is valid, all others are not.
CASES: list[tuple[dict[str, Any], list[str]]] = [
    # names may be spelled in several ways, and repeated
    (OTHERS_ARE_TEXTS, ['{"a":1,"b":"x"}', '{"a":1,"a":"x"}', r'{"a":1,"\u0061":"x"}', r'{"\u0061":"x"}']),
    (OTHERS_ARE_TEXTS | {"properties": {"\n": INTEGER}}, [r'{"\n":1}', r'{"\u000a":"x"}', r'{"\n":"x"}']),
    (
        OTHERS_ARE_TEXTS | {"properties": {"a/é": INTEGER}},
        ['{"a/é":1}', r'{"a\/é":"x"}', r'{"a/\u00e9":"x"}'],
    ),
    ({**OBJECT, "patternProperties": {"^k": INTEGER}}, ['{"k":1,"l":""}', '{"k":""}', r'{"\u006b":"x"}']),
    ({**OBJECT, "minProperties": 1, "additionalProperties": INTEGER}, ['{"a":1}', "{}", '{"a":""}']),
    ({**OBJECT, "maxProperties": 1}, ['{"a":[]}', '{"a":1,"b":2}']),
    ({**OBJECT, "required": ["a"]}, ['{"a":[]}', "{}", '{"b":1}']),
    ({"required": ["a"]}, ["[]", "{}"]),
    (A_INTEGER, ["[]", '{"a":"x"}']),
    # lengths count characters
    ({**STRING, "minLength": 2}, ['"ab"', r'"\u0041"', r'"\n"', '"😀"', r'"\ud83d\ude00"']),
    ({**STRING, "maxLength": 2}, ['"ab"', '"abc"', '"日本語"']),
    ({**STRING, "pattern": "^[^\\n]*$"}, ['"ab"', r'"a\nb"', r'"a\u000ab"']),
    ({**STRING, "pattern": "b"}, ['"abc"', '"ac"']),
    # an escape stands for one character, which the class must contain
    ({**STRING, "pattern": '^[^"]*$'}, [r'"a\\n\\"', r'"\""', r'"a\"b"']),
    ({**STRING, "pattern": r"^[^\\\n]+$"}, [r'"\""', r'"\\"', r'"\n"']),
    ({**STRING, "pattern": r"^[\x00-\x21]$"}, [r'"\n"', r'"\""', r'"\\"']),
    ({**STRING, "pattern": r"^[^]\[a-z]$"}, [r'"\t"', '"]"', '"["']),
    ({**OBJECT, "patternProperties": {'^[^"]$': INTEGER}}, ['{"a":1,"":[]}', '{"a":[]}']),
    ({"anyOf": [INTEGER, STRING], "minLength": 3}, ["1", '"ab"']),
    ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": STRING}}, ['"ab"', '"abc"']),
    ({"enum": ["abc", "d"], "maxLength": 2}, ['"d"', '"abc"']),
    # numbers may be spelled in several ways
    (INTEGER, ["-12", "1.5", "01", "+1", "1.", ".5"]),
    ({**INTEGER, "multipleOf": 3}, ["-6", "4", "-4"]),
    ({**INTEGER, "minimum": 5}, ["5", "4", "-5", "5e-1"]),
    ({**NUMBER, "maximum": 5}, ["5", "1e9", "5.01", "500e-1"]),
    ({**NUMBER, "exclusiveMinimum": 0}, ["0.1", "0", "0.0", "-0.0", "-1e-9"]),
    ({**NUMBER, "exclusiveMinimum": 1, "maximum": 1.5}, ["1.2", "1", "1.0"]),
    ({**NUMBER, "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.2", "0", "-0", "-0.0"]),
    ({**INTEGER, "exclusiveMinimum": 0, "maximum": (1 << 64) - 1}, ["1", "0", str(1 << 64)]),
    ({**NUMBER, "multipleOf": 0.5}, ["1.5", "0.3", "3e-1"]),
    ({"type": ["integer", "null"], "minimum": 3}, ["null", "2"]),
    # arrays
    ({**ARRAY, "minItems": 1, "maxItems": 2}, ["[1,[]]", "[]", "[1,2,3]"]),
    ({**ARRAY, "prefixItems": [INTEGER], "items": STRING}, ['[1,"a"]', '["x"]', "[1,2]"]),
    # combinations
    ({"allOf": [A_INTEGER, {"properties": {"a": {"minimum": 3}}}]}, ['{"a":3}', '{"a":2}']),
    (
        {"allOf": [{**A_INTEGER, "additionalProperties": False}, {"properties": {"b": INTEGER}}]},
        ["{}", '{"b":2}'],
    ),
    ({"oneOf": [INTEGER, STRING]}, ["1", "[]", "1.5"]),
]


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar accepts a text, spelled in single bytes."""
    state = compiler().compile(StructuredOutputs(json=schema)).matcher().state
    ids = [vocabulary().pieces.index(bytes([byte])) for byte in text.encode()]
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


@pytest.mark.parametrize(("schema", "texts"), CASES)
def test_text_that_a_schema_forbids_is_not_accepted(schema: dict[str, Any], texts: list[str]) -> None:
    valid, *invalid = texts
    jsonschema.Draft202012Validator(schema).validate(json.loads(valid))
    assert accepts(schema, valid)
    assert [text for text in invalid if accepts(schema, text)] == []


def test_negated_unicode_property_does_not_match_escapes() -> None:
    """Python's `re` has no such properties, so this is no case for jsonschema."""
    no_punctuation = {**STRING, "pattern": r"^\P{P}$"}
    assert accepts(no_punctuation, r'"\n"')
    assert not accepts(no_punctuation, r'"\""')


def test_repeated_names_do_not_count_for_min_properties() -> None:
    schema = {**OBJECT, "minProperties": 2, "additionalProperties": INTEGER}
    with pytest.raises(
        ParameterError, match="'minProperties', at #, is not supported: it requires more than one"
    ) as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.code == "unsupported_keyword"
    supported = {
        **OBJECT,
        **A_INTEGER,
        "required": ["a"],
        "minProperties": 2,
        "additionalProperties": INTEGER,
    }
    assert accepts(supported, '{"a":1,"b":2}')
    assert not accepts(supported, '{"a":1,"a":2}')
    assert not accepts(supported, '{"a":1}')


def test_constants_may_contain_anything_but_unescapable_control_characters() -> None:
    constant = '\n\u2028/\\"é😀'
    assert json.loads(walk(StructuredOutputs(json={"const": [constant, {constant: None}]}), 0)) == [
        constant,
        {constant: None},
    ]
    for control in ("\x00", "\x1f", "\x7f"):
        with pytest.raises(ParameterError, match="has a control character"):
            compiler().compile(StructuredOutputs(json={"properties": {"a": {"enum": [1, [control]]}}}))


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("maximum", -(1 << 63)),  # would crash the process
        ("minimum", (1 << 53) + 1),
        ("exclusiveMaximum", 1e16),
        ("const", (1 << 53) + 1),
        ("enum", [{"a": [1 << 64]}]),
        ("exclusiveMinimum", True),  # as in draft 4
    ],
)
def test_numbers_that_cannot_be_represented_exactly_are_rejected(keyword: str, value: Any) -> None:
    schema = {"items": {"minimum": -(1 << 63), keyword: value}}
    with pytest.raises(ParameterError, match=f"{keyword}, at #/items, must be a number of at most") as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.code == "invalid_constraint"


@pytest.mark.parametrize("pattern", ["[a-z&&[^b]]", "[[:alpha:]]", "[a][+--]", "[a~~b]"])
def test_character_classes_that_dialects_read_differently_are_rejected(pattern: str) -> None:
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: INTEGER}}):
        with pytest.raises(ParameterError, match="has a character class"):
            compiler().compile(StructuredOutputs(json=schema))
    assert accepts({**STRING, "pattern": r"^[\[\]&-]--~~&&[^]\[]$"}, '"&--~~&&x"')


def test_thousands_of_choices_are_allowed() -> None:
    choices = [f"c{number}" for number in range(4096)]
    assert walk(StructuredOutputs(choice=choices), 0) in choices
