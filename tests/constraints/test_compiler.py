"""What can be compiled, what is refused and why, and that neither takes for ever."""

from __future__ import annotations

from typing import Any

import pytest

from inflight import StructuredOutputs
from inflight.constraints import GrammarCompiler, Vocabulary
from inflight.constraints.compiler import MAX_CACHED
from inflight.constraints.grammars import lark_grammar
from inflight.constraints.trial import needs_trial
from inflight.errors import ParameterError
from inflight.frontend.vocabulary import vocabulary_of
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
        ({"regex": "["}, "unclosed character class"),
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
    grammar.give_back(first)
    assert grammar.matcher() is first
    assert allowed_ids(first) == start


def test_a_forbidden_token_is_an_error_that_stays() -> None:
    grammar = compiler().compile(StructuredOutputs(choice=["abc"]))
    matcher = grammar.matcher()
    matcher.advance([vocabulary().pieces.index(b"z")])
    assert matcher.error == "a token came that it forbids"
    assert allowed_ids(matcher) == []
    grammar.give_back(matcher)
    assert grammar.matcher() is not matcher


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
    for number in range(1, MAX_CACHED + 1):
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


def test_models_that_cannot_be_constrained_say_so() -> None:
    without = GrammarCompiler(lambda: vocabulary_of(None, 10, (1,)))
    without.warm_up()
    with pytest.raises(ParameterError, match="it runs without a tokenizer") as caught:
        without.compile(StructuredOutputs(choice=["a"]))
    assert caught.value.code == "constraints_unavailable"


# Two dozen patterns at once: hours, if nobody ends it.
INTERSECTIONS = {"allOf": [{"type": "string", "pattern": f"a{{{i},{i + 20}}}.*b"} for i in range(28)]}
SPECIAL = vocabulary().pieces[vocabulary().eos_token_ids[0]].decode()
HOSTILE: dict[str, dict[str, Any]] = {
    "intersections": {"json": INTERSECTIONS},
    "behind a special token": {
        "structural_tag": {
            "structures": [{"begin": SPECIAL, "schema": INTERSECTIONS, "end": ""}],
            "triggers": [SPECIAL],
        }
    },
    "multiples": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "pq"]} for i in range(22)]}
    },
    "nesting": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "deep schema": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "parentheses": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(name: str) -> None:
    with pytest.raises(ParameterError):
        compiler().compile(StructuredOutputs(**HOSTILE[name]))


def test_a_grammar_that_grows_in_use_fails_alone() -> None:
    """It can be compiled; a step at a limit is an error of its matcher."""
    matcher = compiler().compile(StructuredOutputs(regex="((a{1,100}){1,100}){1,100}")).matcher()
    token = vocabulary().pieces.index(b"a")
    for _ in range(200):
        if token not in allowed_ids(matcher):
            break
        matcher.advance([token])
    assert matcher.error is not None


def test_plain_schemas_need_no_trial() -> None:
    def is_tried(**given: Any) -> bool:
        asked = StructuredOutputs(**given)
        return needs_trial(asked.kind, lark_grammar(asked, ()))

    assert not is_tried(json={**OBJECT, "properties": {"a": {"type": "string", "format": "date"}}})
    assert not is_tried(choice=['"pattern"'])
    assert is_tried(regex="a")
    assert is_tried(json={"type": "string", "pattern": "a"})
    assert is_tried(json='{"type": "string", "p\\u0061ttern": "a"}')
