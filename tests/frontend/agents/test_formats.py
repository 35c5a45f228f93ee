"""Every format parses recorded outputs and random text made of its parts, whole and in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.frontend.agents.formats.base import REASONING_MARKERS, TOOL_FORMATS
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import ParsedMessage

from .outputs import CONTENT, OUTPUTS, TOOLS, Recorded
from .streams import check_sane, pieces, streamed


def parser(recorded: Recorded) -> MessageParser:
    return MessageParser(recorded.format, recorded.reasoning, tools=TOOLS, prompt=recorded.prompt)


def test_every_format_has_recorded_outputs() -> None:
    assert {recorded.format for recorded in OUTPUTS.values()} == set(TOOL_FORMATS) == set(CONTENT)


@pytest.mark.parametrize("name", OUTPUTS)
def test_recorded_output_parses_to_its_message(name: str) -> None:
    message = parser(OUTPUTS[name]).parse(OUTPUTS[name].text)
    assert message == OUTPUTS[name].message
    for call in message.tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_prefix_and_split_yields_consistent_events(name: str) -> None:
    recorded = OUTPUTS[name]
    for end in range(len(recorded.text)):
        text = recorded.text[:end]
        whole = streamed(parser(recorded), [text])
        check_sane(whole)
        middle = end // 2
        assert streamed(parser(recorded), [text[:middle], text[middle:]]) == whole
    whole = streamed(parser(recorded), [recorded.text])
    assert streamed(parser(recorded), recorded.text) == whole
    for size in (2, 3, 7):
        assert streamed(parser(recorded), pieces(recorded.text, range(0, len(recorded.text), size))) == whole


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in CONTENT for text in CONTENT[name]])
def test_text_that_is_not_a_call_is_content_without_loss(name: str, text: str) -> None:
    assert MessageParser(name, None, tools=TOOLS).parse(text) == ParsedMessage(content=text)


def parts_of(name: str) -> st.SearchStrategy[str]:
    """Generate texts that resemble the format."""
    markers = TOOL_FORMATS.get(name).markers
    recorded = [output.text for output in OUTPUTS.values() if output.format == name]
    words = [
        "get_weather",
        "get_time",
        "city",
        '"name": ',
        '"arguments": ',
        "function",
        "functions.get_time:0",
        "json",
    ]
    tags = [
        "<function=",
        "<parameter=",
        "</parameter>",
        "</function>",
        "<think>",
        "</think>",
        " to=",
        "[",
        "TOOL",
    ]
    signs = [*"{}[]():;,=<>\"'\\\n ", "```", "1", "true", "é🙂", "\\u00", "\\ud83d"]
    slices = st.builds(
        lambda text, ends: text[min(ends) : max(ends)],
        st.sampled_from(recorded),
        st.tuples(*[st.integers(0, 150)] * 2),
    )
    piece = st.sampled_from([*markers, *markers, *words, *tags, *signs]) | slices
    return st.lists(piece, max_size=12).map("".join)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_text_parses_the_same_in_any_pieces(name: str, data: st.DataObject) -> None:
    text = data.draw(parts_of(name))
    cuts = data.draw(st.lists(st.integers(1, max(len(text), 1)), max_size=8))
    reasoning = "harmony" if name == "harmony" else data.draw(st.sampled_from([*REASONING_MARKERS, None]))
    tools = data.draw(st.sampled_from([TOOLS, []]))
    whole = streamed(MessageParser(name, reasoning, tools=tools), [text])
    check_sane(whole)
    assert streamed(MessageParser(name, reasoning, tools=tools), pieces(text, cuts)) == whole
    assert streamed(MessageParser(name, reasoning, tools=tools), text) == whole
    message = ParsedMessage()
    message.add(whole)
    if not message.tool_calls and reasoning is None:
        assert message.content == text
    for call in message.tool_calls:
        call.name.encode()  # must be encodable
        call.arguments.encode()
