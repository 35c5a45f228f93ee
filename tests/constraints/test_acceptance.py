"""No text that a schema forbids is ever accepted, however it is spelled."""

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

# The first text of each is valid, all others are not.
CASES: list[tuple[dict[str, Any], list[str]]] = [
    # a name may be written in several ways, and twice
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
    # an escape stands for one character, which its class must hold
    ({**STRING, "pattern": '^[^"]*$'}, [r'"a\\n\\"', r'"\""', r'"a\"b"']),
    ({**STRING, "pattern": r"^[^\\\n]+$"}, [r'"\""', r'"\\"', r'"\n"']),
    ({**STRING, "pattern": r"^[\x00-\x21]$"}, [r'"\n"', r'"\""', r'"\\"']),
    ({**STRING, "pattern": r"^[^]\[a-z]$"}, [r'"\t"', '"]"', '"["']),
    ({**OBJECT, "patternProperties": {'^[^"]$': INTEGER}}, ['{"a":1,"":[]}', '{"a":[]}']),
    ({"anyOf": [INTEGER, STRING], "minLength": 3}, ["1", '"ab"']),
    ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": STRING}}, ['"ab"', '"abc"']),
    ({"enum": ["abc", "d"], "maxLength": 2}, ['"d"', '"abc"']),
    # numbers may be written in several ways, too
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
    # lists
    ({**ARRAY, "minItems": 1, "maxItems": 2}, ["[1,[]]", "[]", "[1,2,3]"]),
    ({**ARRAY, "prefixItems": [INTEGER], "items": STRING}, ['[1,"a"]', '["x"]', "[1,2]"]),
    # several at once
    ({"allOf": [A_INTEGER, {"properties": {"a": {"minimum": 3}}}]}, ['{"a":3}', '{"a":2}']),
    (
        {"allOf": [{**A_INTEGER, "additionalProperties": False}, {"properties": {"b": INTEGER}}]},
        ["{}", '{"b":2}'],
    ),
    ({"oneOf": [INTEGER, STRING]}, ["1", "[]", "1.5"]),
]


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Spelled in single bytes, which no grammar can mistake for something else."""
    state = compiler().compile(StructuredOutputs(json=schema)).matcher().state
    ids = [vocabulary().pieces.index(bytes([byte])) for byte in text.encode()]
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


@pytest.mark.parametrize(("schema", "texts"), CASES)
def test_what_a_schema_forbids_is_not_accepted(schema: dict[str, Any], texts: list[str]) -> None:
    valid, *invalid = texts
    jsonschema.Draft202012Validator(schema).validate(json.loads(valid))
    assert accepts(schema, valid)
    assert [text for text in invalid if accepts(schema, text)] == []


def test_negated_properties_of_characters_hold_no_escapes() -> None:
    """Not in Python's expressions, so there is nobody to ask."""
    no_punctuation = {**STRING, "pattern": r"^\P{P}$"}
    assert accepts(no_punctuation, r'"\n"')
    assert not accepts(no_punctuation, r'"\""')


def test_names_that_come_twice_cannot_make_up_the_number() -> None:
    schema = {**OBJECT, "minProperties": 2, "additionalProperties": INTEGER}
    with pytest.raises(
        ParameterError, match="'minProperties', at #, is not supported: more than one"
    ) as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.code == "unsupported_keyword"
    fine = {**OBJECT, **A_INTEGER, "required": ["a"], "minProperties": 2, "additionalProperties": INTEGER}
    assert accepts(fine, '{"a":1,"b":2}')
    assert not accepts(fine, '{"a":1,"a":2}')
    assert not accepts(fine, '{"a":1}')


def test_constants_may_hold_anything() -> None:
    constant = '\n\u2028/\\"é😀'
    assert json.loads(walk(StructuredOutputs(json={"const": [constant, {constant: None}]}), 0)) == [
        constant,
        {constant: None},
    ]
    for control in ("\x00", "\x1f", "\x7f"):  # but for what cannot be spelled
        with pytest.raises(ParameterError, match="has a control character"):
            compiler().compile(StructuredOutputs(json={"properties": {"a": {"enum": [1, [control]]}}}))


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("maximum", -(1 << 63)),  # which would crash the process
        ("minimum", (1 << 53) + 1),
        ("exclusiveMaximum", 1e16),
        ("const", (1 << 53) + 1),
        ("enum", [{"a": [1 << 64]}]),
        ("exclusiveMinimum", True),  # as the fourth draft had it
    ],
)
def test_numbers_that_cannot_be_kept_exactly_are_refused(keyword: str, value: Any) -> None:
    schema = {"items": {"minimum": -(1 << 63), keyword: value}}
    with pytest.raises(ParameterError, match=f"{keyword}, at #/items, has a number beyond") as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.code == "invalid_constraint"


@pytest.mark.parametrize("pattern", ["[a-z&&[^b]]", "[[:alpha:]]", "[a][+--]", "[a~~b]"])
def test_classes_that_readers_of_patterns_understand_differently_are_refused(pattern: str) -> None:
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: INTEGER}}):
        with pytest.raises(ParameterError, match="has a class of characters"):
            compiler().compile(StructuredOutputs(json=schema))
    assert accepts({**STRING, "pattern": r"^[\[\]&-]--~~&&[^]\[]$"}, '"&--~~&&x"')


def test_choices_may_be_many() -> None:
    choices = [f"c{number}" for number in range(4096)]
    assert walk(StructuredOutputs(choice=choices), 0) in choices
