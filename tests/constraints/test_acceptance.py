"""No text that a schema forbids is accepted, however it is spelled."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import pytest

from inflight import StructuredOutputs
from inflight.constraints.schema_negation import MAX_WORD_CHARACTERS
from inflight.errors import ParameterError
from tests.constraints import walking
from tests.constraints.schemas import logical_schema, small_value
from tests.constraints.walking import compiler, walk

NUM_SCHEMAS = 200
OBJECT, ARRAY, STRING, INTEGER = ({"type": kind} for kind in ("object", "array", "string", "integer"))
NUMBER = {"type": "number"}
A_INTEGER = {"properties": {"a": INTEGER}}
LONG = "ab" * (MAX_WORD_CHARACTERS // 2)
WORDS = ["a" * length for length in range(31)]  # nearly as many characters
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
    ({"oneOf": [{"minimum": 2}, {**INTEGER, "maximum": 5}]}, ["1", "2", "5"]),
    # integral floats
    ({**STRING, "maxLength": 2.0, "minLength": 1.0}, ['"ab"', '""', '"abc"']),
    ({**ARRAY, "contains": {"const": 1}, "minContains": 2.0}, ["[1,2,1]", "[1,2]"]),
    # negations
    ({"not": STRING}, ["1", '"a"']),
    ({**STRING, "not": {"enum": ["a", "ab"]}}, ['"abc"', '"a"', '"ab"']),
    ({**STRING, "not": {"const": '"'}}, ['"a"', r'"\""']),
    ({**STRING, "not": {"pattern": "^x-"}}, ['"x"', '"x-"', '"x-a"']),
    ({**STRING, "not": {"pattern": f"^{LONG}"}}, [f'"{LONG[:-1]}"', f'"{LONG}"', f'"{LONG}a"']),
    ({**STRING, "not": {"pattern": f"^{LONG}$"}}, [f'"{LONG}a"', f'"{LONG}"']),
    ({**STRING, "not": {"enum": WORDS}}, [f'"{"a" * 31}"', *(f'"{word}"' for word in WORDS)]),
    ({**INTEGER, "not": {"enum": [3, 5]}}, ["4", "3", "5"]),
    ({**OBJECT, "not": {"required": ["a"]}}, ['{"b":1}', '{"a":1}', '{"b":1,"a":1}']),
    ({"not": {"anyOf": [INTEGER, {**STRING, "minLength": 2}]}}, ['"a"', "1", '"ab"']),
    ({**ARRAY, "not": {"items": INTEGER}}, ['[1,"a"]', "[]", "[1,2]"]),
    # conditions
    (
        {
            **OBJECT,
            "properties": {"kind": {"enum": ["a", "b"]}, "size": INTEGER},
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["size"]},
            "else": {"properties": {"size": False}},
        },
        ['{"kind":"a","size":1}', '{"kind":"a"}', '{"kind":"b","size":1}'],
    ),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":1}', '{"a":1}', '{"c":1,"a":1}']),
    (
        {**OBJECT, "dependentSchemas": {"a": {"properties": {"b": INTEGER}}}},
        ['{"b":"x"}', '{"a":1,"b":"x"}'],
    ),
    ({**OBJECT, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, ["{}", '{"a":1}', '{"c":1}']),
    # items
    ({**ARRAY, "contains": {"const": 5}}, ["[1,5,2]", "[]", "[1]"]),
    ({**ARRAY, "contains": STRING, "maxContains": 1, "minContains": 0}, ['[1,"a"]', '["a","b"]']),
    ({**ARRAY, "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, ['["b","a"]', '["a","a"]']),
    ({**ARRAY, "items": {"enum": list("abcdefg")}, "uniqueItems": True}, ['["b","g"]', '["g","g"]']),
    ({**ARRAY, "uniqueItems": True, "maxItems": 1}, ["[1]", "[1,1]"]),
    ({**ARRAY, "prefixItems": [INTEGER], "unevaluatedItems": False}, ["[1]", "[1,2]", '["a"]']),
    # properties
    ({**OBJECT, "propertyNames": {"pattern": "^[ab]"}}, ['{"ax":1}', '{"c":1}', '{"a":1,"c":1}']),
    ({**OBJECT, **A_INTEGER, "propertyNames": {"maxLength": 2}}, ['{"a":1,"bb":2}', '{"bbb":2}']),
    ({**OBJECT, "propertyNames": {"enum": ["a", "b"]}}, ['{"b":1}', '{"c":1}']),
    ({**OBJECT, **A_INTEGER, "unevaluatedProperties": False}, ['{"a":1}', '{"b":1}']),
    (
        {
            **OBJECT,
            **A_INTEGER,
            "anyOf": [{"properties": {"b": STRING}, "required": ["b"]}, {"properties": {"c": STRING}}],
            "unevaluatedProperties": False,
        },
        ['{"a":1,"b":"x","c":"y"}', '{"d":1}', '{"b":1}'],
    ),
    # references
    (
        {**OBJECT, "properties": {"a": {"not": {"$ref": "#/$defs/b"}}}, "$defs": {"b": {"minLength": 2}}},
        ['{"a":"x"}', '{"a":"xy"}'],
    ),
    (
        {**ARRAY, "items": {"$dynamicRef": "#x"}, "$defs": {"x": {"$dynamicAnchor": "x", **STRING}}},
        ['["a"]', "[1]"],
    ),
]


def accepts(schema: dict[str, Any], text: str) -> bool:
    return walking.accepts(StructuredOutputs(json=schema), text)


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


@pytest.mark.parametrize(
    ("kind", "valid", "invalid"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-04-30"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01"],
        ),
        (
            "time",
            ["23:59:60Z", "08:30:06.28+01:00", "12:00:00z"],
            ["22:59:60Z", "23:59:60+01:00", "24:00:00Z"],
        ),
        (
            "date-time",
            ["2024-02-29T12:00:00Z"],
            ["2023-02-29T12:00:00Z", "2024-02-29T12:58:60Z", "2024-02-29"],
        ),
    ],
)
def test_dates_and_times_follow_the_calendar(kind: str, valid: list[str], invalid: list[str]) -> None:
    schema = {**STRING, "format": kind}
    assert [text for text in valid if not accepts(schema, f'"{text}"')] == []
    assert [text for text in invalid if accepts(schema, f'"{text}"')] == []


@pytest.mark.parametrize(
    "condition",
    [
        {"dependentRequired": {"b": ["a"]}},
        {"not": {"required": ["c"]}},
        {"if": {"properties": {"b": {"const": 1}}, "required": ["b"]}, "then": {"required": ["a"]}},
        {"propertyNames": {"enum": ["a", "b", "z"]}},
        {"allOf": [{"required": ["a"]}], "unevaluatedProperties": False},
    ],
)
def test_conditions_keep_the_order_of_properties(condition: dict[str, Any]) -> None:
    schema = {**OBJECT, "properties": dict.fromkeys("zba", INTEGER), **condition}
    assert accepts(schema, '{"z":1,"b":1,"a":1}')
    assert not accepts(schema, '{"a":1,"b":1,"z":1}')


def test_byte_order_mark_is_neither_space_nor_text() -> None:
    """ECMA 262 calls it whitespace, other dialects do not."""
    for pattern in (r"^\s$", r"^\S$", r"^[\S]$", r"^[^\s]$"):
        assert not accepts({**STRING, "pattern": pattern}, '"\ufeff"')
    assert accepts({**STRING, "pattern": r"^\s[^\s]$"}, '" a"')


@pytest.mark.parametrize("part", range(2))
def test_conditions_and_negations_allow_no_invalid_value(part: int) -> None:
    """Random schemas and values, in addition to random walks. Most schemas must be supported."""
    num_supported = num_valid = num_accepted = 0
    for seed in range(part * NUM_SCHEMAS // 2, (part + 1) * NUM_SCHEMAS // 2):
        generator = random.Random(seed)
        constraint = StructuredOutputs(json={"title": "random", "allOf": [logical_schema(generator)]})
        schema = json.loads(constraint.text)
        try:
            compiler().compile(constraint)
        except ParameterError:
            continue
        num_supported += 1
        validator = jsonschema.Draft202012Validator(schema)
        with contextlib.suppress(walking.NoEndError):
            validator.validate(json.loads(walk(constraint, seed)))
        for value in (small_value(generator) for _ in range(20)):
            is_accepted = walking.accepts_value(constraint, value)
            if is_accepted:
                validator.validate(value)
            num_valid += validator.is_valid(value)
            num_accepted += is_accepted
    assert num_supported > 0.6 * NUM_SCHEMAS / 2
    assert num_accepted > 0.99 * num_valid


def test_thousands_of_choices_are_allowed() -> None:
    choices = [f"c{number}" for number in range(4096)]
    assert walk(StructuredOutputs(choice=choices), 0) in choices
