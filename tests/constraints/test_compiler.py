"""Which constraints compile, and which are rejected with which message."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from inflight import StructuredOutputs
from inflight.constraints import compiler as compiling
from inflight.constraints.compiler import MAX_CACHED, Grammar, GrammarCompiler
from inflight.constraints.schema import MAX_OPTIONAL
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from tests.constraints.walking import allowed_ids, compiler, vocabulary, walk

OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"format": "email"}}, "format"),
        ({"not": {"pattern": "^" + "a" * 501}}, "pattern"),
        ({"if": {"multipleOf": 2}, "then": {"minimum": 3}}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"pattern": "a"}, "maxContains": 1}, "pattern"),
        ({"type": "array", "contains": {"const": 1}, "minContains": 9}, "contains"),
        ({**OBJECT, "propertyNames": {"format": "email"}}, "propertyNames"),
        ({"contains": {"const": 1}, "unevaluatedItems": False}, "unevaluatedItems"),
        ({"$dynamicRef": "#x", "$defs": {name: {"$dynamicAnchor": "x"} for name in "ab"}}, "$dynamicRef"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({**OBJECT, "requried": ["a"]}, "requried"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({**OBJECT, "properties": {"not": {"anyOf": [{"items": {"uniqueItems": True}}]}}}, "uniqueItems"),
        ({**OBJECT, "dependentSchemas": {"a": {"nullable": True}}}, "nullable"),
        ({"not": {"if": {"requried": []}}}, "requried"),
        ({**OBJECT, "$defs": {"a": {"else": {}}}}, "else"),
        ({**OBJECT, "additionalProperties": {"minContains": 1}}, "minContains"),
    ],
)
def test_unsupported_keyword_is_named(schema: dict[str, Any], keyword: str) -> None:
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
def test_unsupported_keyword_without_effect_is_accepted(schema: dict[str, Any]) -> None:
    assert walk(StructuredOutputs(json=schema), 0)


@pytest.mark.parametrize(
    ("embedded", "message", "code"),
    [
        ('{"nullable": true}', "after %json: the keyword 'nullable', at #", "unsupported_keyword"),
        ('{"items": {"requried": []}}', "'requried', at #/items", "unsupported_keyword"),
        ('{"x-guidance": {"lenient": true}}', "x-guidance after %json may only have", "invalid_constraint"),
        ("{", "the text after %json is not JSON", "invalid_constraint"),
    ],
)
def test_schemas_in_a_grammar_are_checked(embedded: str, message: str, code: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        compiler().compile(
            StructuredOutputs(grammar=f'start: "a" value // of %json\nvalue: %json {embedded}')
        )
    assert caught.value.code == code


def test_regex_over_two_lines_does_not_hide_a_schema() -> None:
    with pytest.raises(ParameterError, match="the keyword 'nullable'"):
        compiler().compile(StructuredOutputs(grammar='start: /x\n"/ %json {"nullable": true}'))


def test_long_error_message_keeps_its_end() -> None:
    with pytest.raises(ParameterError, match=r"a+ \.\.\. .*unclosed group"):
        compiler().compile(StructuredOutputs(regex="a" * 2000 + "("))


def test_schemas_in_a_grammar_are_rewritten_like_any_other() -> None:
    grammar = (
        'start: "%json {" one /\\/%json \\{/ // %json {\none: %json {"pattern": "^[^\\"]$", "type": "string"}'
    )
    for seed in range(5):
        text = walk(StructuredOutputs(grammar=grammar), seed)
        assert len(json.loads(text.removeprefix("%json {").removesuffix("/%json {"))) == 1


def test_grammar_may_set_the_layout_of_its_json() -> None:
    layout = {"whitespace_flexible": False, "item_separator": "; "}
    grammar = f"start: %json {json.dumps({'x-guidance': layout, 'const': [1, 2]})}"
    assert walk(StructuredOutputs(grammar=grammar), 0) == "[1; 2]"


def test_names_and_constants_are_not_mistaken_for_keywords() -> None:
    schema = {
        **OBJECT,
        "properties": {"not": {"enum": [{"if": 1}], "default": {"contains": 2}}},
        "required": ["not"],
    }
    assert '"if"' in walk(StructuredOutputs(json=schema), 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[" * 100_000}, "json is not JSON|nested too deeply"),
        ({"json": '{"anyOf":[' * 400 + "{}" + "]}" * 400}, "is nested too deeply"),
        ({"json": "3"}, "json is of type int: a JSON schema is an object"),
        ({"json": False}, "schema is false"),
        ({"json": {"type": "str"}}, "Invalid type: str"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"$ref": "http://example.com/s"}}, "http://example.com/s"),
        ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
        ({"grammar": "start: a\na: a"}, "refers to itself before it matches any text"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf overlap.*: use anyOf"),
        ({"json": {"pattern": r"[^a]\b[^\n]"}}, r"not supported: /\[\^a\]\\b\[\^\\n\]/$"),
        ({"json": {"pattern": "a[b"}}, "a character class that is not closed"),
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
            "the structure '<a' begins with no trigger",
        ),
    ],
)
def test_invalid_constraint_is_explained(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        compiler().compile(StructuredOutputs(**fields))
    assert caught.value.param == "structured_outputs"
    assert "llguidance" not in str(caught.value)


NODE = {**OBJECT, "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    ("schema", "pointer"),
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
def test_schema_without_finite_values_is_rejected(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(f": {pointer} refers back to itself")) as caught:
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
def test_recursive_schema_with_finite_values_is_accepted(schema: dict[str, Any]) -> None:
    compiler().compile(StructuredOutputs(json=schema))


def test_end_token_is_allowed_where_the_text_may_end_and_forced_where_it_must() -> None:
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
    matcher.advance([end, end])  # as with ignore_eos
    assert allowed_ids(matcher) == [end]
    assert matcher.error is None


def test_special_tokens_do_not_spell_text() -> None:
    special = vocabulary().pieces[vocabulary().eos_token_ids[0]].decode()
    for seed in range(3):
        assert walk(StructuredOutputs(choice=[special]), seed) == special
    matcher = compiler().compile(StructuredOutputs(choice=[special])).matcher()
    assert not vocabulary().special_ids & set(allowed_ids(matcher))


def test_matchers_of_one_grammar_are_independent() -> None:
    grammar = compiler().compile(StructuredOutputs(choice=["abc"]))
    first, second = grammar.matcher(), grammar.matcher()
    start = allowed_ids(second)
    first.advance([vocabulary().pieces.index(b"a")])
    assert allowed_ids(second) == start != allowed_ids(first)
    assert allowed_ids(grammar.matcher()) == start


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """A compiler whose lexers are crowded with two matchers, and that adds lexers at once."""
    monkeypatch.setattr(compiling, "MATCHERS_PER_LEXER", 1)
    crowded = GrammarCompiler(vocabulary)
    monkeypatch.setattr(crowded._threads, "submit", lambda _owner, work: work())
    return crowded


def test_crowded_grammar_gets_further_lexers_up_to_a_limit(
    crowded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_LEXERS", 3)
    grammar = crowded.compile(StructuredOutputs(regex="[ab]{3}c"))
    matchers = [grammar.matcher() for _ in range(7)]
    sizes = Counter(matcher.lexer for matcher in matchers).values()
    assert sorted(sizes) == [2, 2, 3]
    for token in map(vocabulary().pieces.index, (b"a", b"b", b"b", b"c")):
        assert [allowed_ids(matcher) for matcher in matchers] == [allowed_ids(matchers[0])] * 7
        for matcher in matchers:
            matcher.advance([token])
    assert not any(matcher.error for matcher in matchers)
    del matcher, matchers[:]
    assert (
        len({matcher.lexer for matcher in [grammar.matcher() for _ in range(3)]}) == 3
    )  # kept for later requests


def test_spare_lexers_of_all_grammars_are_limited(
    crowded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_SPARE_LEXERS", 2)
    monkeypatch.setattr(compiling, "MAX_LEXERS", 2)
    grammars = [crowded.compile(StructuredOutputs(choice=[f"{number}"])) for number in range(3)]
    matchers = [[grammar.matcher() for _ in range(3)] for grammar in grammars]
    assert [len(grammar._lexers) for grammar in grammars] == [2, 2, 1]  # the spare ones are in use
    matchers[0].clear()
    matchers[2].append(grammars[2].matcher())
    assert [len(grammar._lexers) for grammar in grammars] == [1, 2, 2]


def test_first_grammar_gets_further_lexers_though_the_vocabulary_takes_long(
    crowded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    tokenizer = Vocabulary.tokenizer

    def build_slowly(words: Vocabulary) -> Any:
        now[0] += 10
        return tokenizer(words)

    monkeypatch.setattr(Vocabulary, "tokenizer", build_slowly)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("inflight.constraints.compiler.time", clock)
    grammar = crowded.compile(StructuredOutputs(choice=["abc"]))
    assert len({matcher.lexer for matcher in [grammar.matcher() for _ in range(4)]}) > 1


def test_grammar_that_compiles_slowly_keeps_one_lexer(
    crowded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_SECONDS_TO_REPEAT", 0.0)
    grammar = crowded.compile(StructuredOutputs(choice=["abc"]))
    assert len({matcher.lexer for matcher in [grammar.matcher() for _ in range(4)]}) == 1


def test_forbidden_token_is_a_permanent_error() -> None:
    grammar = compiler().compile(StructuredOutputs(choice=["abc"]))
    matcher = grammar.matcher()
    matcher.advance([vocabulary().pieces.index(b"z")])
    assert matcher.error == "it does not allow a token that was sampled"
    assert allowed_ids(matcher) == []
    assert grammar.matcher().error is None


def test_grammars_and_rejections_are_cached_until_evicted() -> None:
    small = GrammarCompiler(lambda: Vocabulary([b"a", b"b", b""], frozenset(), (2,)))
    valid, invalid = StructuredOutputs(choice=["a"]), StructuredOutputs(json={"uniqueItems": True})
    assert not small.is_compiled(valid)
    assert small.compile(valid) is small.compile(StructuredOutputs(choice=["a"]))
    for _ in range(2):
        with pytest.raises(ParameterError, match="'uniqueItems'"):
            small.compile(invalid)
    assert small.is_compiled(valid)
    assert small.is_compiled(invalid)
    for number in range(1, MAX_CACHED + 1):
        small.compile(StructuredOutputs(choice=["a" * number]))
    assert not small.is_compiled(invalid)


def test_warm_up_builds_the_vocabulary_once() -> None:
    made: list[Vocabulary] = []

    def make() -> Vocabulary:
        made.append(Vocabulary([b"a", b""], frozenset(), (1,)))
        return made[-1]

    cold = GrammarCompiler(make)
    cold.warm_up()
    assert len(made) == 1
    cold.compile(StructuredOutputs(choice=["aa"]))
    assert len(made) == 1


def test_grammar_that_reaches_a_limit_in_use_fails_its_matcher() -> None:
    matcher = compiler().compile(StructuredOutputs(regex="((a{1,100}){1,100}){1,100}")).matcher()
    token = vocabulary().pieces.index(b"a")
    for _ in range(200):
        if token not in allowed_ids(matcher):
            break
        matcher.advance([token])
    assert matcher.error is not None


def test_maximum_number_of_optional_properties_can_be_followed() -> None:
    names = [f"p{number}" for number in range(MAX_OPTIONAL)]
    schema = {
        **OBJECT,
        "properties": {name: {"type": "string"} for name in names},
        "additionalProperties": False,
    }
    assert walk(StructuredOutputs(json={**schema, "required": names[-1:]}), 0)


def test_slow_grammars_of_one_tenant_leave_a_thread_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, proceed, begun = GrammarCompiler(vocabulary), threading.Event(), threading.Semaphore(0)
    compile_ = shared._compile

    def compile_slowly(is_large: bool, constraint: StructuredOutputs) -> Grammar:
        if "slow" in constraint.text:
            begun.release()
            proceed.wait(60)
        return compile_(is_large, constraint)

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
