"""Harmony, the format of gpt-oss: messages on channels.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}<|call|>

What is on `analysis` is reasoning. A message to a function is a call, on whatever channel. All else is content: what is
on `final`, and what `commentary` says to the user before calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta, ParserEvent, ReasoningDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import AnswerShape, RuleWriter
from inflight.agents.json_reader import read_value
from inflight.agents.source import Markers, Reading, Source
from inflight.errors import ParameterError

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CONSTRAIN, _CALL = "<|end|>", "<|constrain|>", "<|call|>"
_ENDS = (_END, _CALL, "<|return|>")
_HEADER_STARTS = (_START, _CHANNEL, _MESSAGE, " to=")  # the prompt ends with `<|start|>assistant`
_BEGIN, _END_OF_HEADER = Markers(_START, _CHANNEL), Markers(_MESSAGE)
_END_OF_BODY = Markers(*_ENDS, _START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")


class _HarmonyReader:
    """Reads one output, which may be several messages. Those of a kind become lines of one."""

    def __init__(self, calls: Calls, with_calls: bool) -> None:
        self._calls, self._with_calls = calls, with_calls
        self._seen: set[type[ParserEvent]] = set()

    def read(self, source: Source) -> Reading[None]:
        while True:
            while (header := (yield from self._header(source))) is not None:
                yield from self._body(source, header)
            if stray := (yield from source.accept(_START, _CHANNEL)):
                yield ContentDelta(stray)
            beginning = yield from source.until(_BEGIN, ContentDelta)
            if beginning is None:
                return
            source.back(len(beginning))

    def _header(self, source: Source) -> Reading[str | None]:
        """All that comes before a message's text; None, and nothing read, if nothing does."""
        source.hold()
        start = yield from source.accept(*_HEADER_STARTS)
        rest, end = "", start
        if start is not None and start != _MESSAGE:
            rest, end = yield from source.text_until(_END_OF_HEADER)
        if start is None or end is None:
            source.rewind()
            return None
        source.release()
        return start + rest

    def _body(self, source: Source, header: str) -> Reading[None]:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = recipient.group(1) if recipient else ""
        if self._with_calls and name.startswith("functions."):
            yield from self._call(source, name.removeprefix("functions."))
            return
        thinks = channel is not None and channel.group(1) == "analysis"
        source.in_reasoning = thinks
        ending = yield from source.until(
            _END_OF_BODY, self._teller(ReasoningDelta if thinks else ContentDelta)
        )
        source.in_reasoning = False
        if ending is not None and ending not in _ENDS:
            source.back(len(ending))

    def _call(self, source: Source, name: str) -> Reading[None]:
        yield self._calls.begin(name)
        yield from source.skip_space()
        if (
            yield from source.peek()
        ) == "{":  # the token that ends the output is not in its text, so count brackets
            complete = yield from read_value(source, self._calls.arguments)
            yield from self._calls.end(complete)
            yield from source.accept_after_space(*_ENDS)
            yield from source.skip_last_space()
            return
        ending = yield from source.until(_END_OF_BODY, self._calls.arguments)
        yield from self._calls.end(ending is not None)
        if ending is not None and ending not in _ENDS:
            source.back(len(ending))

    def _teller(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> Callable[[str], ParserEvent]:
        before = "\n" if kind in self._seen else ""

        def tell(text: str) -> ParserEvent:
            nonlocal before
            self._seen.add(kind)
            text, before = before + text, ""
            return kind(text)

        return tell


def _read(source: Source, calls: Calls) -> Reading[None]:
    yield from _HarmonyReader(calls, with_calls=True).read(source)


def _read_channels(source: Source, calls: Calls) -> Reading[None]:
    yield from _HarmonyReader(calls, with_calls=False).read(source)


def _opened(prompt: str) -> str:
    """The header of a message whose text the output goes on with."""
    last = prompt[prompt.rfind(_START) :] if _START in prompt else ""
    header, message, text = last.partition(_MESSAGE)
    return header + message if message and not any(end in text for end in _ENDS) else ""


def harmony_answer(writer: RuleWriter, shape: AnswerShape, opened: str) -> str:
    """`opened` is the header of a message that the prompt has begun."""
    if not all(map(writer.is_special, (_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN, _CALL))):
        raise ParameterError(
            "the tokenizer of this model lacks tokens of harmony, so its answers cannot be constrained",
            code="constraints_unavailable",
        )
    text = writer.text("TEXT")
    if opened and "analysis" not in opened:  # it is in its last message already
        return shape.content or text
    limit = shape.max_reasoning_tokens
    next_message = writer.marked(_END, _START, "assistant")
    said = writer.rule("thoughts" if not limit else f"thoughts[max_tokens={limit}]", text)
    thought = f"{writer.marked(_CHANNEL, 'analysis', _MESSAGE)} {said} {next_message}"
    # A limit is one message's, so with one there is but one.
    many = "*" if limit is None else "?"
    thoughts = "" if limit == 0 else f"({thought}){many}"
    last = writer.rule("last", _last_message(writer, shape, text))
    if opened:
        rest = next_message if limit == 0 else f"{said} {next_message}"
        return f"{rest} {thoughts if limit is None else ''} {last}"
    return f"{thoughts} {last}"


def _last_message(writer: RuleWriter, shape: AnswerShape, text: str) -> str:
    final = f"{writer.marked(_CHANNEL, 'final', _MESSAGE)} {shape.content or text}"
    if not shape.tools:
        return final
    to_function = writer.marked(_CHANNEL, "commentary to=functions.")
    begin_arguments = writer.marked(_CONSTRAIN, "json", _MESSAGE)
    ways = " | ".join(
        f'{writer.marked(tool.name)} " "? {begin_arguments} {arguments}'
        for tool, arguments in writer.arguments(tools=shape.tools)
    )
    call = f"{to_function} ({ways}) {writer.marked(_CALL)}?"
    if shape.is_required:
        return call
    if shape.content is not None:
        return f"{call} | {final}"
    words = (
        f"{writer.marked(_CHANNEL, 'commentary', _MESSAGE)} {text} {writer.marked(_END, _START, 'assistant')}"
    )
    return f"({words})? {call} | {final}"


_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
HARMONY = ToolFormat(_read, _MARKERS, opened=_opened)
HARMONY_WITHOUT_CALLS = ToolFormat(_read_channels, _MARKERS, opened=_opened)
