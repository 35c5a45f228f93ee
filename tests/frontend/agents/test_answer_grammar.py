"""The parser reads valid calls from any answer that is sampled under its grammar."""

from __future__ import annotations

import json
import re
from contextlib import closing
from typing import Any

import jsonschema
import pytest

from inflight import StructuredOutputs
from inflight.constraints.validator import GrammarValidator
from inflight.errors import ParameterError
from inflight.frontend.agents.answer_grammar import answer_grammar
from inflight.frontend.agents.formats.base import REASONING_MARKERS, TOOL_FORMATS, ToolFormat
from inflight.frontend.agents.grammar_writer import InputGrammar
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import ParsedMessage
from inflight.frontend.input_processor import vocabulary_of
from tests.constraints.walking import allowed_ids

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


def make_model(tool_format: str | None, reasoning: str | None, special: bool) -> Model:
    format = TOOL_FORMATS.get(tool_format) if tool_format else ToolFormat()
    markers, openings = format.markers, format.openings.texts
    reasoning_markers = REASONING_MARKERS.get(reasoning or "")
    all_markers = (*markers, *(reasoning_markers.markers if reasoning_markers else ()))
    words = list(openings)
    if special:
        words = [
            part for text in openings for part in re.split("|".join(map(re.escape, markers)) or "$", text)
        ]
    words = [word for word in words if word and word not in all_markers]
    return Model.with_markers(tuple(dict.fromkeys(all_markers)), special, tuple(words))


def check_calls(message: ParsedMessage) -> None:
    for call in message.tool_calls:
        assert call.complete
        jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


def test_every_format_has_a_grammar_that_is_tested() -> None:
    assert {tool_format for tool_format, _, _ in FORMATS} == set(TOOL_FORMATS)


# Tool call format, reasoning format, and whether the markers are special tokens.
FORMATS = [
    ("hermes", "think", False),
    ("hermes", "seed_oss", True),
    ("qwen3_coder", None, False),
    ("qwen3_coder", "think", True),
    ("glm45", "think", False),
    ("glm45", None, True),
    ("mistral", "mistral", True),
    ("mistral", None, False),
    ("deepseek_v3", "think", True),
    ("kimi_k2", "kimi_vl", True),
    ("llama3_json", None, True),
    ("llama3_json", "think", False),
    ("pythonic", None, True),
    ("harmony", "harmony", True),
    ("longcat", None, False),
    ("granite", "granite", True),
    ("granite_20b_fc", None, False),
    ("phi4_mini", None, False),
    ("jamba", "hunyuan_a13b", False),
    ("internlm2", None, True),
    ("nemotron", "think", False),
    ("cohere_command", "cohere_command", True),
    ("apertus", None, True),
    ("gigachat3", None, True),
    ("xlam", None, False),
    ("seed_oss", "seed_oss", True),
    ("minimax_m2", "think", True),
    ("deepseek_v32", "think", True),
    ("deepseek_v4", None, False),
    ("step3", "think", True),
    ("hy_v3", None, True),
    ("solar_open2", "think", True),
    ("minicpm5", None, False),
    ("kimi_k3", "kimi_k3", True),
    ("gemma4", "gemma4", True),
    ("functiongemma", None, True),
    ("olmo3", "think", False),
    ("lfm2", None, True),
]


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_required_calls_are_valid(tool_format: str, reasoning: str | None, special: bool) -> None:
    model = make_model(tool_format, reasoning, special)
    counts, has_reasoning = set[int](), False
    for seed in range(256):
        if (
            seed >= 16
            and (len(counts) > 1 or tool_format == "harmony")
            and (has_reasoning or reasoning is None)
        ):
            break
        message = model.answer(seed, tool_format, reasoning, TOOLS, tool_choice="required")
        assert message.tool_calls
        assert not message.content
        check_calls(message)
        counts.add(len(message.tool_calls))
        has_reasoning |= bool(message.reasoning)
    assert has_reasoning or reasoning is None
    assert len(counts) > 1 or tool_format == "harmony"  # whose answers end with the first call


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_named_tool_choice_yields_one_call_of_that_tool(
    tool_format: str, reasoning: str | None, special: bool
) -> None:
    model = make_model(tool_format, reasoning, special)
    for seed in range(4):
        message = model.answer(seed, tool_format, reasoning, TOOLS, tool_choice=NAMED, parallel=False)
        assert [call.name for call in message.tool_calls] == ["get_weather"]
        check_calls(message)


PATCH = """start: begin hunk{1,3} end
begin: "*** Begin" LF
hunk: ("+" | "-") /(.{0,9})/ LF -> line
end: "*** End" LF?
%import common.LF
"""
INPUTS = {
    "lark": (InputGrammar("lark", PATCH, "tools[0]"), r"\*\*\* Begin\n([+-].*\n)+\*\*\* End\n?"),
    "recursive": (
        InputGrammar("lark", 'start: e\ne: /[a-z"]/ | "(" e " + " e ")"', "tools[0]"),
        r'[a-z"]|\([a-z"() +]+\)',
    ),
    "regex": (
        InputGrammar("regex", r'^[a-z]{1,9} = "[^"\n]{0,9}"\n;/$', "tools[0]"),
        r'[a-z]+ = "[^"\n]{0,9}"\n;/',
    ),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_free_text_input_matches_its_grammar(
    tool_format: str, reasoning: str | None, special: bool, kind: str
) -> None:
    grammar, pattern = INPUTS[kind]
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": "edit", "parameters": schema, "strict": True, "input_grammar": grammar}
    tools = [*TOOLS, {"type": "function", "function": function}]
    model = make_model(tool_format, reasoning, special)
    named = type("NamedTool", (), {"name": "edit"})()
    for seed in range(6):
        message = model.answer(seed, tool_format, reasoning, tools, tool_choice=named, parallel=False)
        (call,) = message.tool_calls
        assert call.complete
        assert re.fullmatch(pattern, json.loads(call.arguments)["input"]), call.arguments
    both = model.answer(1, tool_format, reasoning, tools, tool_choice="required")
    assert {call.name for call in both.tool_calls} <= {*SCHEMAS, "edit"}


def test_unusable_input_grammar_is_rejected() -> None:
    model = make_model("hermes", None, False)
    for definition, message in (
        ("start: %json {}", "%json is not supported"),
        ("start: x", "edit.definition"),
    ):
        grammar = InputGrammar("lark", definition, "edit.definition")
        function = {"name": "edit", "strict": True, "input_grammar": grammar}
        with pytest.raises(ParameterError, match=message) as error:
            model.answer(
                1, "hermes", None, [{"type": "function", "function": function}], tool_choice="required"
            )
        assert error.value.param == "edit.definition"


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_optional_calls_of_strict_tools_are_valid(
    tool_format: str, reasoning: str | None, special: bool
) -> None:
    model = make_model(tool_format, reasoning, special)
    messages: list[ParsedMessage] = []
    while len(messages) < 16 or (len(messages) < 256 and not any(message.tool_calls for message in messages)):
        messages.append(model.answer(len(messages), tool_format, reasoning, TOOLS))
        check_calls(messages[-1])
    assert any(message.tool_calls for message in messages)
    assert any(message.content for message in messages)


@pytest.mark.parametrize(("tool_format", "reasoning", "special"), FORMATS)
def test_answer_is_calls_or_constrained_content(
    tool_format: str, reasoning: str | None, special: bool
) -> None:
    model = make_model(tool_format, reasoning, special)
    content = StructuredOutputs(json=PLACE)
    messages = [model.answer(seed, tool_format, reasoning, TOOLS, content=content) for seed in range(16)]
    for message in messages:
        check_calls(message)
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), PLACE)
    assert len({bool(message.tool_calls) for message in messages}) == 2


def test_no_grammar_without_constraints() -> None:
    plain = [TOOLS[1]]
    assert answer_grammar("hermes", "think", tools=plain) is None
    assert answer_grammar("hermes", "think", tools=TOOLS, tool_choice="none") is None
    content = StructuredOutputs(choice=["a"])
    assert answer_grammar(None, None, content=content) is content


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
@pytest.mark.parametrize(
    "content",
    [StructuredOutputs(json=PLACE), StructuredOutputs(regex="[a-c]{2}"), StructuredOutputs(choice=["yes"])],
)
def test_constrained_content_follows_reasoning(
    content: StructuredOutputs, prompt: str, special: bool
) -> None:
    model = make_model(None, "think", special)
    messages = [model.answer(seed, None, "think", (), content=content, prompt=prompt) for seed in range(8)]
    for message in messages:
        match content.kind:
            case "json":
                jsonschema.validate(json.loads(message.content), PLACE)
            case "regex":
                assert re.fullmatch("[a-c]{2}", message.content)
            case _:
                assert message.content == "yes"
    assert any(message.reasoning for message in messages)


@pytest.mark.parametrize("reasoning", ["think", "harmony"])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("limit", [0, 3])
def test_budget_ends_reasoning(reasoning: str, opened: bool, limit: int) -> None:
    tool_format = "harmony" if reasoning == "harmony" else None
    model = make_model(tool_format, reasoning, special=reasoning == "harmony")
    prompts = {"think": "<think>", "harmony": "<|start|>assistant<|channel|>analysis<|message|>"}
    prompt = prompts[reasoning] if opened else ""
    constraint = answer_grammar(
        None, reasoning, max_reasoning_tokens=limit, prompt=prompt, tokenizer=model.tokenizer
    )
    assert constraint is not None
    longest = 0
    for seed in range(20):
        ids = model.walk(constraint, seed)
        parser = MessageParser(None, reasoning, tokenizer=model.tokenizer, prompt=prompt)
        reasoning_text = model.read(parser, ids).reasoning
        longest = max(longest, len(reasoning_text))
        assert limit or not reasoning_text
        for count in range(1, len(ids)):  # a matcher that replays the tokens so far has counted them all
            replayed = model.matcher(constraint)
            replayed.advance(ids[:count])
            assert ids[count] in allowed_ids(replayed, model.tokenizer.vocab_size)
        words = model.tokenizer.encode(reasoning_text, parse_special=False)
        assert len(reasoning_text) <= limit * max(len(model.text([i])) for i in (*ids, *words))
    assert bool(longest) == bool(limit)
    grammar = model.grammars.compile(constraint)
    used = grammar.matcher()
    used.advance(model.walk(constraint, 0))
    assert allowed_ids(grammar.matcher(), model.tokenizer.vocab_size)  # starts from the beginning


def test_budget_needs_an_end_marker_of_one_token() -> None:
    model = make_model(None, None, special=False)
    with pytest.raises(ParameterError, match="not a single token") as caught:
        answer_grammar(None, "think", max_reasoning_tokens=5, tokenizer=model.tokenizer)
    assert caught.value.param == "max_reasoning_tokens"


def with_schema(schema: Any, strict: bool) -> list[dict[str, Any]]:
    return [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]


def compile_tools(model: Model, tool_format: str, tools: list[dict[str, Any]]) -> None:
    constraint = answer_grammar(
        tool_format, None, tools=tools, tool_choice="required", tokenizer=model.tokenizer
    )
    assert constraint is not None
    model.grammars.compile(constraint)


@pytest.mark.parametrize("tool_format", ["hermes", "kimi_k2", "glm45", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "'uniqueItems'"),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}, "required": ["a"]},
            "'nullable'",
        ),
        ({"type": "object", "properties": {"a": {"type": "object", "requried": []}}}, "'requried'"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"format": "x"}}}}, "format: x"),
    ],
)
def test_unsupported_schema_is_rejected_if_strict_and_loosened_otherwise(
    tool_format: str, schema: dict[str, Any], error: str
) -> None:
    model = make_model(tool_format, None, special=True)
    with pytest.raises(ParameterError, match=error) as caught:
        compile_tools(model, tool_format, with_schema(schema, strict=True))
    assert caught.value.param == "tools[1].function.parameters"
    tools = with_schema(schema, strict=False)
    for seed in range(4):
        message = model.answer(seed, tool_format, None, tools, tool_choice="required")
        assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)


def test_strict_keyword_that_the_format_cannot_guarantee_is_rejected() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
    with pytest.raises(ParameterError, match="'pattern', at #/properties/a") as caught:
        answer_grammar("qwen3_coder", None, tools=with_schema(schema, True), tool_choice="required")
    assert caught.value.code == "unsupported_keyword"


BUSY = {"allOf": [{"type": "string", "pattern": f"a{{{i},{i + 20}}}.*b"} for i in range(28)]}


def test_hostile_tools_are_rejected_in_time() -> None:
    """A hostile tool is also rejected after a tool whose own error would end the validation of all of them."""
    model = make_model("hermes", None, special=True)
    wrong = {"name": "g", "parameters": {"type": "object", "properties": {"a": {"format": "x"}}}}
    busy = with_schema({"type": "object", "properties": {"a": BUSY}, "required": ["a"]}, strict=False)
    vocabulary = vocabulary_of(model.tokenizer, model.tokenizer.vocab_size, (model.end,))
    with closing(GrammarValidator(lambda: vocabulary)) as validator:
        for tools in (busy, [{"type": "function", "function": wrong}, *busy]):
            constraint = answer_grammar(
                "hermes", None, tools=tools, tool_choice="required", tokenizer=model.tokenizer
            )
            assert constraint is not None
            with pytest.raises(ParameterError) as caught:
                validator.validate(constraint)
            assert (caught.value.param, caught.value.code) == ("tools", "constraint_too_complex")


def test_many_tools_are_allowed_but_too_long_schemas_are_rejected() -> None:
    model = make_model("hermes", None, special=True)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(512)]
    compile_tools(model, "hermes", tools)
    long = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(20)}}

    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": long}} for i in range(512)]
    # Calls are not constrained here, so their schemas do not count.
    assert answer_grammar("hermes", "think", tools=tools, max_reasoning_tokens=0) is not None
    with pytest.raises(ParameterError, match="at most 131072") as caught:
        compile_tools(model, "hermes", tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("value", "is_allowed"),
    [
        ("<![CDATA[a < b</param>]]></param>", True),
        ("a < b</param>", True),
        ("<![CDATA[a]]> b</param>", False),
        ("a <![CDATA[b", False),
        ("<![CDATA[abcdef", None),  # `code` has at most four characters
    ],
)
def test_text_of_minicpm5_may_be_in_cdata(value: str, is_allowed: bool | None) -> None:
    model = make_model("minicpm5", None, False)
    grammar = answer_grammar(
        "minicpm5", None, tools=TOOLS, tokenizer=model.tokenizer, tool_choice=NAMED, parallel=False
    )
    assert grammar is not None
    begin, end = (
        '<function name="get_weather"><param name="city">',
        '<param name="unit">37</param></function>',
    )
    if is_allowed is None:
        begin += 'a</param><param name="unit">37</param><param name="code">'
    ids = model.tokenizer.encode(begin + value + end, add_special_tokens=False)
    matcher = model.matcher(grammar)
    matcher.advance(ids)
    assert (matcher.error is None) == bool(is_allowed)
    if is_allowed:
        message = model.read(MessageParser("minicpm5", None, tools=TOOLS, tokenizer=model.tokenizer), ids)
        text = value.removesuffix("</param>").removeprefix("<![CDATA[").removesuffix("]]>")
        assert json.loads(message.tool_calls[0].arguments) == {"city": text, "unit": "37"}
