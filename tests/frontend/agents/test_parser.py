from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.errors import ConfigError
from inflight.frontend.agents.formats.json_calls import MAX_JSON_HEADER
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import (
    MAX_TRIMMED_SPACE,
    ArgumentsDelta,
    ContentDelta,
    ParsedMessage,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.tokenizer import Tokenizer
from tests.frontend.agents.answers import runs
from tests.frontend.text.samples import byte_level_backend

from .outputs import OUTPUTS, TOOLS


def test_events_are_emitted_as_soon_as_they_are_certain() -> None:
    parser = MessageParser("hermes", "think", tools=TOOLS)
    steps = [
        ("<think", []),
        (">\nHm", [ReasoningDelta("Hm")]),
        (" <", []),
        ("3 </thi", [ReasoningDelta(" <3")]),
        ("nk>\n\n", []),
        ("Let me", [ContentDelta("Let me")]),
        (" look.\n", [ContentDelta(" look.")]),
        ("<tool_call>\n", []),
        ('{"name": "get_weather", "arguments"', []),
        (": ", []),
        ('{"ci', [ToolCallBegun(0, "get_weather"), ArgumentsDelta(0, '{"ci')]),
        ('ty": "P}', [ArgumentsDelta(0, 'ty": "P}')]),
        ('"}', [ArgumentsDelta(0, '"}'), ToolCallEnded(0, True)]),
        ("}\n</tool_call>\n", []),
        ("So", [ContentDelta("\nSo")]),
    ]
    for text, events in steps:
        assert parser.feed(text) == events, text
    assert parser.finish() == []


def test_strings_between_tags_are_streamed() -> None:
    parser = MessageParser("qwen3_coder", None, tools=TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>")
    assert parser.feed("\nNew ") == [ArgumentsDelta(0, '{"city": "New ')]
    assert parser.feed('"York"\n') == [ArgumentsDelta(0, '\\"York\\"')]
    assert parser.feed("City") == [ArgumentsDelta(0, "\\nCity")]
    assert parser.feed("\n</parameter>\n</function>") == [
        ArgumentsDelta(0, '"}'),
        ToolCallEnded(0, True),
    ]


def test_nothing_is_emitted_after_finish() -> None:
    parser = MessageParser("hermes", None)
    assert parser.feed("a <tool") == [ContentDelta("a")]
    assert parser.finish() == [ContentDelta(" <tool")]
    assert parser.finish() == []
    assert parser.feed("more") == []


def test_reasoning_is_recognized_only_at_the_start() -> None:
    text = "Write <think>this</think>."
    assert MessageParser(None, "think").parse(text) == ParsedMessage(content=text)
    assert MessageParser(None, "think").parse("\n<think>\na\n") == ParsedMessage(reasoning="a\n")
    opened = MessageParser(None, "think", prompt="<|im_start|>assistant\n<think>\n")
    assert opened.parse("<think>a</think><think>") == ParsedMessage("<think>", "a")
    closed = MessageParser(None, "think", prompt="<think>\n\n</think>\n\n")
    assert closed.parse("a</think>") == ParsedMessage("a</think>")


def test_channels_without_tools_have_no_calls() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    assert MessageParser(None, "harmony").parse(text) == ParsedMessage("{}", "a")


def test_unknown_format_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown tool call parser 'herms': choose one of hermes, "):
        MessageParser("herms", None)
    with pytest.raises(ConfigError, match="unknown reasoning parser 'thonk': choose one of think, "):
        MessageParser(None, "thonk")


# The names of vLLM's parsers, apart from those of MiniMax M3 and Inkling.
VLLM_TOOL_PARSERS = (
    *("apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32"),
    *("deepseek_v4", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite"),
    *("granite-20b-fc", "granite4", "hermes", "hunyuan_a13b", "hy_v3", "internlm", "jamba", "kimi_k2"),
    *("kimi_k3", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minicpm5"),
    *("minimax", "minimax_m2", "mistral", "olmo3", "openai", "phi4_mini_json", "poolside_v1", "pythonic"),
    *("qwen3_coder", "qwen3_xml", "seed_oss", "solar_open2", "step3", "step3p5", "xlam"),
)
VLLM_REASONING_PARSERS = (
    *("cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45"),
    *("gemma4", "glm45", "glm47", "granite", "holo2", "hunyuan_a13b", "hy_v3", "kimi_k2", "kimi_k3"),
    *("mimo", "minimax_m2", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "poolside_v1", "qwen3"),
    *("seed_oss", "step3", "step3p5"),
)


def test_parsers_of_vllm_can_be_named() -> None:
    for name in VLLM_TOOL_PARSERS:
        assert MessageParser(name, None).parse("Hello") == ParsedMessage("Hello")
    for name in VLLM_REASONING_PARSERS:
        assert MessageParser(None, name).parse("Hello") == ParsedMessage("Hello")
    assert len(VLLM_TOOL_PARSERS) >= 40


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("granite4", "hermes"),
        ("ernie45", "hermes"),
        ("qwen3_xml", "qwen3_coder"),
        ("mimo", "qwen3_coder"),
        ("step3p5", "qwen3_coder"),
        ("glm47", "glm45"),
        ("poolside_v1", "glm45"),
        ("hunyuan_a13b", "jamba"),
        ("minimax", "jamba, no brackets, reasoning and answer in tags"),
        ("deepseek_v31", "deepseek_v3, as v3.1 writes"),
        ("granite-20b-fc", "granite_20b_fc"),
        ("internlm", "internlm2"),
        ("llama4_json", "llama3_json"),
        ("llama4_pythonic", "pythonic"),
        ("phi4_mini_json", "phi4_mini"),
        ("cohere_command3", "cohere_command"),
        ("cohere_command4", "cohere_command"),
        ("openai", "harmony"),
    ],
)
def test_parser_named_by_vllm_reads_its_format(name: str, recorded: str) -> None:
    output = OUTPUTS[recorded]
    parser = MessageParser(name, output.reasoning, tools=TOOLS, prompt=output.prompt)
    assert parser.parse(output.text) == output.message


def test_held_back_text_is_bounded() -> None:
    parser = MessageParser("hermes", None)
    parser.feed('<tool_call>{"name": "')
    assert parser.feed("x" * (MAX_JSON_HEADER - 12)) == []
    [event] = parser.feed("x" * 2)
    assert isinstance(event, ContentDelta)
    spaces = MessageParser("hermes", None).feed(" " * 1000)
    assert spaces == [ContentDelta(" " * (1000 - MAX_TRIMMED_SPACE))]


SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def parse_deltas(tokenizer: Tokenizer, deltas: list[list[int]]) -> ParsedMessage:
    parser = MessageParser("mistral", None, tokenizer=tokenizer)
    assert parser.marker_ids == {tokenizer.token_id("[TOOL_CALLS]"), tokenizer.token_id("[ARGS]")}
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    message = ParsedMessage()
    for delta in deltas:
        for run in runs(parser, delta):
            message.add(parser.feed(detokenizer.push(run), run))
    message.add(parser.feed(detokenizer.flush()))
    message.add(parser.finish())
    return message


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["[TOOL_CALLS]", 'f[ARGS]{"a": 1}', " said 🙂 ", "[TOOL"]), max_size=5),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
@example(parts=["[TOOL_CALLS]", 'f[ARGS]{"a": 1}'], cuts=[])
def test_special_token_is_a_marker_but_its_spelling_is_not(
    tokenizer: Tokenizer, parts: list[str], cuts: list[int]
) -> None:
    spelled = "".join(parts)
    ids = tokenizer.encode(spelled, parse_special=False)
    ids += tokenizer.encode('[TOOL_CALLS]f[ARGS]{"a": ') + tokenizer.encode('"[ARGS]"', parse_special=False)
    ids += tokenizer.encode("}")
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    message = parse_deltas(tokenizer, [ids[start:end] for start, end in pairwise(borders)])
    assert message.content == spelled.rstrip()
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": "[ARGS]"}')]


def test_prompt_that_ends_with_a_special_token_opens_reasoning(tokenizer: Tokenizer) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    tokenizer = Tokenizer(backend)
    parser = MessageParser(None, "mistral", tokenizer=tokenizer, prompt="[/INST][THINK]")
    end = tokenizer.token_id("[/THINK]")
    assert end is not None
    message = ParsedMessage()
    for text, ids in (("a [/THINK]", []), ("[/THINK]", [end]), ("b", [])):
        message.add(parser.feed(text, ids))
    assert message == ParsedMessage("b", "a [/THINK]")


def test_markers_in_constrained_content_are_text() -> None:
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    content = json.dumps({"quoted": call})
    assert MessageParser("glm45", "think").parse(content).tool_calls
    message = MessageParser("glm45", "think", shaped_content=True).parse(f"<think>Hm</think>\n\n{content}")
    assert (message.reasoning, message.content, message.tool_calls) == ("Hm", content, [])
    message = MessageParser("glm45", "think", shaped_content=True).parse(f"<think>Hm</think>\n\n{call}")
    assert [called.name for called in message.tool_calls] == ["f"]


def test_stray_end_tokens_are_not_shown() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(backend)
    parser = MessageParser("hermes", None, tokenizer=tokenizer)
    end = tokenizer.token_id("</tool_call>")
    assert end is not None
    message = ParsedMessage()
    for text, ids in (("It is </tool_call>", []), (" </tool_call>", [end]), (" late.", [])):
        message.add(parser.feed(text, ids))
    message.add(parser.finish())
    assert message == ParsedMessage("It is </tool_call>  late.")


def test_call_in_reasoning_ends_the_reasoning_when_it_is_certain() -> None:
    parser = MessageParser("hermes", "think")
    assert parser.feed("<think>Hm. <tool_call>") == [ReasoningDelta("Hm.")]
    assert parser.in_reasoning
    assert parser.feed("? ") == [ReasoningDelta(" <tool_call>?")]
    assert parser.feed('<tool_call>{"name": "f", ') == []
    assert parser.feed('"arguments": {')[0] == ToolCallBegun(0, "f")
    assert not parser.in_reasoning
