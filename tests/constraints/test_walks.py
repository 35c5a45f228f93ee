"""Whatever is drawn, the text is valid."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from inflight import StructuredOutputs
from tests.constraints.schemas import schema
from tests.constraints.walking import walk

NUM_SCHEMAS = 501  # about 7 ms each


@pytest.mark.parametrize("part", range(3))
def test_random_texts_of_random_schemas_are_valid(part: int) -> None:
    for seed in range(part * NUM_SCHEMAS // 3, (part + 1) * NUM_SCHEMAS // 3):
        given = schema(random.Random(seed))
        text = walk(StructuredOutputs(json=given), seed)
        jsonschema.Draft202012Validator(given).validate(json.loads(text))


@pytest.mark.parametrize("seed", range(10))
def test_any_json_object(seed: int) -> None:
    assert isinstance(json.loads(walk(StructuredOutputs(json_object=True), seed)), dict)


@pytest.mark.parametrize("pattern", ["[ab]{2,5}-\\d+", "(yes|no)!?", "[^x]{1,9}", "a/b\\.c?", "é|[あ-ん]{2}"])
def test_regular_expressions_match_from_beginning_to_end(pattern: str) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, walk(StructuredOutputs(regex=pattern), seed))


def test_one_of_the_choices_and_every_one_of_them() -> None:
    choices = ["yes", "yes, but", 'a "quoted"\n\\one', "日本"]
    found = {walk(StructuredOutputs(choice=choices), seed) for seed in range(60)}
    assert found == set(choices)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: "a" item+\nitem: "[" item* "]"', "a[\\[\\]]+"),
        ('root ::= "x" [0-9]+ ("," [0-9]+)*', "x\\d+(,\\d+)*"),
        ("start: NAME\nNAME: /[a-z]{3}/ & /.*b.*/", "[a-z]{3}"),
    ],
)
def test_grammars_of_both_syntaxes(grammar: str, expected: str) -> None:
    for seed in range(5):
        text = walk(StructuredOutputs(grammar=grammar), seed)
        assert re.fullmatch(expected, text)
        assert text.count("[") == text.count("]")


def test_structural_tags_constrain_what_a_trigger_begins() -> None:
    tags = {
        "structures": [
            {"begin": "<f=one>", "schema": {"type": "boolean"}, "end": "</f>"},
            {"begin": "<f=two>", "schema": {"const": [1]}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    asked = StructuredOutputs(structural_tag=tags)
    for seed in range(5):
        for call in walk(asked, seed).split("<f=")[1:]:
            assert re.match(r"one>\s?(true|false)\s?</f>|two>\s*\[\s*1\s*\]\s*</f>", call)
