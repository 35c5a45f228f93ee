"""What can be compiled, and what is refused and why."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from inflight import StructuredOutputs
from inflight.constraints import Grammar, GrammarCompiler, Vocabulary
from inflight.constraints.compiler import MAX_KEPT
from inflight.constraints.schema import MAX_OPTIONAL
from inflight.errors import ParameterError
from tests.constraints.walking import allowed_ids, compiler, vocabulary, walk

OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({**OBJECT, "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**OBJECT, "dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({**OBJECT, "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({**OBJECT, "requried": ["a"]}, "requried"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({**OBJECT, "properties": {"not": {"anyOf": [{"items": {"not": {}}}]}}}, "not"),
        ({**OBJECT, "$defs": {"a": {"else": {}}}}, "else"),
        ({**OBJECT, "additionalProperties": {"minContains": 1}}, "minContains"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ParameterError) as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.code == "unsupported_keyword"
    assert caught.value.param == "structured_outputs"
    assert f"the keyword {keyword!r}" in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "unevaluatedItems": True, "minItems": 1},
        {**OBJECT, "nullable": False, "unevaluatedProperties": True},
    ],
)
def test_a_keyword_that_is_not_supported_may_say_nothing(schema: dict[str, Any]) -> None:
    assert walk(StructuredOutputs(json=schema), 0)


@pytest.mark.parametrize(
    ("embedded", "message", "code"),
    [
        ('{"nullable": true}', "behind %json: the keyword 'nullable', at #", "unsupported_keyword"),
        ('{"items": {"requried": []}}', "'requried', at #/items", "unsupported_keyword"),
        ('{"x-guidance": {"lenient": true}}', "x-guidance behind %json may have", "invalid_constraint"),
        ("{", "what follows %json is no JSON", "invalid_constraint"),
    ],
)
def test_schemas_in_a_grammar_are_checked(embedded: str, message: str, code: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        compiler().compile(
            StructuredOutputs(grammar=f'start: "a" value // of %json\nvalue: %json {embedded}')
        )
    assert caught.value.code == code


def test_an_expression_over_two_lines_hides_no_schema() -> None:
    with pytest.raises(ParameterError, match="the keyword 'nullable'"):
        compiler().compile(StructuredOutputs(grammar='start: /x\n"/ %json {"nullable": true}'))


def test_the_end_of_a_long_refusal_is_told() -> None:
    with pytest.raises(ParameterError, match=r"a+ \.\.\. .*unclosed group"):
        compiler().compile(StructuredOutputs(regex="a" * 2000 + "("))


def test_schemas_in_a_grammar_are_what_they_are_elsewhere() -> None:
    grammar = (
        'start: "%json {" one /\\/%json \\{/ // %json {\none: %json {"pattern": "^[^\\"]$", "type": "string"}'
    )
    for seed in range(5):
        text = walk(StructuredOutputs(grammar=grammar), seed)
        assert len(json.loads(text.removeprefix("%json {").removesuffix("/%json {"))) == 1


def test_a_grammar_may_say_how_its_json_is_set_out() -> None:
    layout = {"whitespace_flexible": False, "item_separator": "; "}
    grammar = f"start: %json {json.dumps({'x-guidance': layout, 'const': [1, 2]})}"
    assert walk(StructuredOutputs(grammar=grammar), 0) == "[1; 2]"


def test_what_only_looks_like_a_keyword_is_none() -> None:
    schema = {
        **OBJECT,
        "properties": {"not": {"enum": [{"if": 1}], "default": {"contains": 2}}},
        "required": ["not"],
    }
    assert '"if"' in walk(StructuredOutputs(json=schema), 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[" * 100_000}, "json is no JSON|nested too deeply"),
        ({"json": '{"anyOf":[' * 400 + "{}" + "]}" * 400}, "is nested too deeply"),
        ({"json": "3"}, "json is a int: a JSON schema is an object"),
        ({"json": False}, "schema is false"),
        ({"json": {"type": "str"}}, "Invalid type: str"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"$ref": "http://example.com/s"}}, "http://example.com/s"),
        ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
        ({"grammar": "start: a\na: a"}, "leads back to itself before anything is written"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf overlap.*: use anyOf"),
        ({"json": {"pattern": r"[^a]\b[^\n]"}}, r"not supported: /\[\^a\]\\b\[\^\\n\]/$"),
        ({"json": {"pattern": "a[b"}}, "a class of characters that is not closed"),
        ({"json": {"type": "number", "multipleOf": -1}}, "must be a number above 0"),
        ({"json": {"properties": {str(i): {} for i in range(2000)}}}, "has 2000 that are not required"),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": r"(a)\1"}, r"regex parse error: \(a\)\\1: backreferences are not supported$"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": "what is this"}, "neither Lark nor GBNF"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": 'root ::= "a" missing'}, "Rule 'missing' not found"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "must be {.structures"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<a", "schema": {}, "end": ""}],
                    "triggers": ["<b"],
                }
            },
            "no trigger begins the structure '<a'",
        ),
    ],
)
def test_mistakes_are_explained(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        compiler().compile(StructuredOutputs(**given))
    assert caught.value.param == "structured_outputs"
    assert "llguidance" not in str(caught.value)


NODE = {**OBJECT, "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#"),
        ({"allOf": [{"$ref": "#"}]}, "#"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"oneOf": [{"$ref": "#"}]}}}, "#"),
        ({**OBJECT, "$defs": {"node": {**NODE, "required": ["next"]}}}, "#/$defs/node"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "#"),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/a~1b"},
                "minItems": 1,
                "$defs": {"a/b": {"$ref": "#"}},
            },
            "#",
        ),
    ],
)
def test_what_never_comes_to_an_end_is_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(f": {place} leads back to itself for ever")) as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.code == "invalid_constraint"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"anyOf": [{**NODE, "required": ["next"]}, {"type": "null"}]}},
        },
        {"type": "array", "items": {"$ref": "#"}, "default": {"$ref": "#/default"}},
        {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_what_may_come_to_an_end_is_not(schema: dict[str, Any]) -> None:
    compiler().compile(StructuredOutputs(json=schema))


def test_a_text_ends_only_where_its_grammar_may_and_must_where_nothing_follows() -> None:
    (end,) = vocabulary().eos_token_ids
    matcher = compiler().compile(StructuredOutputs(choice=["a", "aab"])).matcher()
    pieces = vocabulary().pieces
    assert end not in allowed_ids(matcher)
    matcher.advance([pieces.index(b"a")])
    assert {end, pieces.index(b"a")} <= set(allowed_ids(matcher))
    matcher.advance([pieces.index(b"a")])
    assert allowed_ids(matcher) == [pieces.index(b"b")]
    matcher.advance([pieces.index(b"b")])
    assert allowed_ids(matcher) == [end]
    matcher.advance([end, end])  # of requests that ignore it
    assert allowed_ids(matcher) == [end]
    assert matcher.error is None


def test_special_tokens_spell_no_text() -> None:
    special = vocabulary().pieces[vocabulary().eos_token_ids[0]].decode()
    for seed in range(3):
        assert walk(StructuredOutputs(choice=[special]), seed) == special
    matcher = compiler().compile(StructuredOutputs(choice=[special])).matcher()
    assert not vocabulary().special_ids & set(allowed_ids(matcher))


def test_matchers_of_one_grammar_know_nothing_of_each_other() -> None:
    grammar = compiler().compile(StructuredOutputs(choice=["abc"]))
    first, second = grammar.matcher(), grammar.matcher()
    start = allowed_ids(second)
    first.advance([vocabulary().pieces.index(b"a")])
    assert allowed_ids(second) == start != allowed_ids(first)
    assert allowed_ids(grammar.matcher()) == start


def test_a_forbidden_token_is_an_error_that_stays() -> None:
    grammar = compiler().compile(StructuredOutputs(choice=["abc"]))
    matcher = grammar.matcher()
    matcher.advance([vocabulary().pieces.index(b"z")])
    assert matcher.error == "a token came that it forbids"
    assert allowed_ids(matcher) == []
    assert grammar.matcher().error is None


def test_grammars_and_refusals_are_kept_but_not_for_ever() -> None:
    small = GrammarCompiler(lambda: Vocabulary([b"a", b"b", b""], frozenset(), (2,)))
    asked, wrong = StructuredOutputs(choice=["a"]), StructuredOutputs(json={"not": {}})
    assert not small.is_compiled(asked)
    assert small.compile(asked) is small.compile(StructuredOutputs(choice=["a"]))
    for _ in range(2):
        with pytest.raises(ParameterError, match="'not'"):
            small.compile(wrong)
    assert small.is_compiled(asked)
    assert small.is_compiled(wrong)
    for number in range(1, MAX_KEPT + 1):
        small.compile(StructuredOutputs(choice=["a" * number]))
    assert not small.is_compiled(wrong)


def test_warming_up_makes_what_the_first_constraint_would_wait_for() -> None:
    made: list[Vocabulary] = []

    def make() -> Vocabulary:
        made.append(Vocabulary([b"a", b""], frozenset(), (1,)))
        return made[-1]

    cold = GrammarCompiler(make)
    cold.warm_up()
    assert len(made) == 1
    cold.compile(StructuredOutputs(choice=["aa"]))
    assert len(made) == 1


def test_a_grammar_that_grows_in_use_fails_alone() -> None:
    """It can be compiled; a step at a limit is an error of its matcher."""
    matcher = compiler().compile(StructuredOutputs(regex="((a{1,100}){1,100}){1,100}")).matcher()
    token = vocabulary().pieces.index(b"a")
    for _ in range(200):
        if token not in allowed_ids(matcher):
            break
        matcher.advance([token])
    assert matcher.error is not None


def test_as_many_optional_properties_as_may_be_can_be_followed() -> None:
    names = [f"p{number}" for number in range(MAX_OPTIONAL)]
    schema = {
        **OBJECT,
        "properties": {name: {"type": "string"} for name in names},
        "additionalProperties": False,
    }
    assert walk(StructuredOutputs(json={**schema, "required": names[-1:]}), 0)


def test_slow_grammars_of_one_tenant_leave_a_thread_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, proceed, begun = GrammarCompiler(vocabulary), threading.Event(), threading.Semaphore(0)
    compile_ = shared._compile

    def compile_slowly(is_large: bool, asked: StructuredOutputs) -> Grammar:
        if "slow" in asked.text:
            begun.release()
            proceed.wait(60)
        return compile_(is_large, asked)

    monkeypatch.setattr(shared, "_compile", compile_slowly)
    slow = [shared.begin(StructuredOutputs(choice=["slow", f"{i}"]), "a") for i in range(8)]
    try:
        assert begun.acquire(timeout=60)
        for name in "bc":
            assert shared.begin(StructuredOutputs(choice=["fast", name]), name).result(60)
        assert not begun.acquire(blocking=False)  # one at a time
        assert slow[-1].cancel()  # as when its request is aborted
    finally:
        proceed.set()
    assert all(future.result(60) for future in slow[:-1])
    assert not shared.is_compiled(StructuredOutputs(choice=["slow", "7"]))
