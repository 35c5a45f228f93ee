"""Random walks through a grammar always give valid texts."""

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
        random_schema = schema(random.Random(seed))
        text = walk(StructuredOutputs(json=random_schema), seed)
        jsonschema.Draft202012Validator(random_schema).validate(json.loads(text))


@pytest.mark.parametrize("seed", range(10))
def test_json_object_gives_an_object(seed: int) -> None:
    assert isinstance(json.loads(walk(StructuredOutputs(json_object=True), seed)), dict)


@pytest.mark.parametrize("pattern", ["[ab]{2,5}-\\d+", "(yes|no)!?", "[^x]{1,9}", "a/b\\.c?", "é|[あ-ん]{2}"])
def test_regex_matches_the_whole_text(pattern: str) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, walk(StructuredOutputs(regex=pattern), seed))


def test_every_choice_can_be_generated_and_nothing_else() -> None:
    choices = ["yes", "yes, but", 'a "quoted"\n\\one', "日本"]
    texts = {walk(StructuredOutputs(choice=choices), seed) for seed in range(60)}
    assert texts == set(choices)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: "a" item+\nitem: "[" item* "]"', "a[\\[\\]]+"),
        ('root ::= "x" [0-9]+ ("," [0-9]+)*', "x\\d+(,\\d+)*"),
        ("start: NAME\nNAME: /[a-z]{3}/ & /.*b.*/", "[a-z]{3}"),
    ],
)
def test_lark_and_gbnf_grammars_are_followed(grammar: str, expected: str) -> None:
    for seed in range(5):
        text = walk(StructuredOutputs(grammar=grammar), seed)
        assert re.fullmatch(expected, text)
        assert text.count("[") == text.count("]")


def test_structural_tag_constrains_text_after_a_trigger() -> None:
    tags = {
        "structures": [
            {"begin": "<f=one>", "schema": {"type": "boolean"}, "end": "</f>"},
            {"begin": "<f=two>", "schema": {"const": [1]}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    constraint = StructuredOutputs(structural_tag=tags)
    for seed in range(5):
        for call in walk(constraint, seed).split("<f=")[1:]:
            assert re.match(r"one>\s?(true|false)\s?</f>|two>\s*\[\s*1\s*\]\s*</f>", call)
