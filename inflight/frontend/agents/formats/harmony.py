"""Harmony, the format of gpt-oss: messages on channels.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}<|call|>

The `analysis` channel is reasoning. A message to a function is a call, on any channel. Everything else is content: the
`final` channel, and `commentary` to the user before calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inflight.errors import ParameterError
from inflight.frontend.agents.formats.base import CallEmitter, ToolFormat
from inflight.frontend.agents.grammar_writer import AnswerShape, GrammarWriter
from inflight.frontend.agents.source import (
    ContentDelta,
    Markers,
    ParserEvent,
    Reading,
    ReasoningDelta,
    Source,
)
from inflight.frontend.agents.values import emit_value

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CONSTRAIN, _CALL = "<|end|>", "<|constrain|>", "<|call|>"
_ENDS = (_END, _CALL, "<|return|>")
_HEADER_STARTS = (_START, _CHANNEL, _MESSAGE, " to=")  # the prompt ends with `<|start|>assistant`
# Recipients that are not functions.
_BUILT_IN = ("python", "browser", "container", "assistant", "user", "all")
_BEGIN, _END_OF_HEADER = Markers(_START, _CHANNEL), Markers(_MESSAGE)
_END_OF_BODY = Markers(*_ENDS, _START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")


class _HarmonyReader:
    """Reads one output, which may be several messages. Messages of the same kind become lines of one."""

    def __init__(self, calls: CallEmitter, with_calls: bool) -> None:
        self._calls, self._with_calls = calls, with_calls
        self._seen: set[type[ParserEvent]] = set()

    def read(self, source: Source) -> Reading[None]:
        while True:
            while (header := (yield from self._take_header(source))) is not None:
                yield from self._read_body(source, header)
            if stray := (yield from source.accept(_START, _CHANNEL)):
                yield ContentDelta(stray)
            beginning = yield from source.emit_until(_BEGIN, ContentDelta)
            if beginning is None:
                return
            source.unread(len(beginning))

    def _take_header(self, source: Source) -> Reading[str | None]:
        """Return everything before a message's text. Return None, and read nothing, if there is no header."""
        source.hold()
        start = yield from source.accept(*_HEADER_STARTS)
        rest, end = "", start
        if start is not None and start != _MESSAGE:
            rest, end = yield from source.take_until(_END_OF_HEADER)
        if start is None or end is None:
            source.rewind()
            return None
        source.release()
        return start + rest

    def _read_body(self, source: Source, header: str) -> Reading[None]:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = recipient.group(1) if recipient else ""
        if self._with_calls and self._is_function(name):
            yield from self._read_call(source, name.removeprefix("functions."))
            return
        is_reasoning = channel is not None and channel.group(1) == "analysis"
        source.in_reasoning = is_reasoning
        event = self._delta_maker(ReasoningDelta if is_reasoning else ContentDelta)
        ending = yield from source.emit_until(_END_OF_BODY, event)
        source.in_reasoning = False
        if ending is not None and ending not in _ENDS:
            source.unread(len(ending))

    def _is_function(self, recipient: str) -> bool:
        """Return whether this is a function. Models omit the namespace, which their built-in tools do not have."""
        if recipient.startswith("functions."):
            return True
        is_built_in = recipient.partition(".")[0] in _BUILT_IN
        return bool(recipient) and self._calls.may_call(recipient, unless_known=not is_built_in)

    def _read_call(self, source: Source, name: str) -> Reading[None]:
        yield self._calls.begin(name)
        yield from source.skip_space()
        # The token that ends the output is not in its text, so the end of an object is found by its brackets.
        if (yield from source.peek()) == "{":
            complete = yield from emit_value(source, self._calls.arguments)
            yield from self._calls.end(complete)
            yield from source.accept_after_space(*_ENDS)
            yield from source.skip_trailing_space()
            return
        ending = yield from source.emit_until(_END_OF_BODY, self._calls.arguments)
        yield from self._calls.end(ending is not None)
        if ending is not None and ending not in _ENDS:
            source.unread(len(ending))

    def _delta_maker(
        self, delta_type: type[ContentDelta] | type[ReasoningDelta]
    ) -> Callable[[str], ParserEvent]:
        before = "\n" if delta_type in self._seen else ""

        def make_delta(text: str) -> ParserEvent:
            nonlocal before
            self._seen.add(delta_type)
            text, before = before + text, ""
            return delta_type(text)

        return make_delta


def _read(source: Source, calls: CallEmitter, with_calls: bool = True) -> Reading[None]:
    return _HarmonyReader(calls, with_calls).read(source)


def _opened_by(prompt: str) -> str:
    """Return the header of the message that the prompt leaves unfinished, or ""."""
    last_header = prompt[prompt.rfind(_START) :] if _START in prompt else ""
    header, message, text = last_header.partition(_MESSAGE)
    return header + message if message and not any(end in text for end in _ENDS) else ""


def harmony_answer(writer: GrammarWriter, shape: AnswerShape, opened: str) -> str:
    """Return the grammar of an answer: reasoning on `analysis`, then a call or the `final` message.

    `opened` is the header of a message that the prompt has begun.
    """
    if not all(map(writer.is_special, (_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN, _CALL))):
        raise ParameterError(
            "this model's answers cannot be constrained: its tokenizer lacks special tokens of the harmony format",
            code="constraints_unavailable",
        )
    text = writer.text("TEXT")
    if opened and "analysis" not in opened:  # the prompt has already begun the last message
        return shape.content or text
    limit = shape.max_reasoning_tokens
    next_message = writer.terminals(_END, _START, "assistant")
    reasoning = writer.rule("reasoning" if not limit else f"reasoning[max_tokens={limit}]", text)
    message = f"{writer.terminals(_CHANNEL, 'analysis', _MESSAGE)} {reasoning} {next_message}"
    # A limit applies to one message, so with a limit there is only one.
    many = "*" if limit is None else "?"
    messages = "" if limit == 0 else f"({message}){many}"
    last_rule = writer.rule("last", _last_message(writer, shape, text))
    if opened:
        rest = next_message if limit == 0 else f"{reasoning} {next_message}"
        return f"{rest} {messages if limit is None else ''} {last_rule}"
    return f"{messages} {last_rule}"


def _last_message(writer: GrammarWriter, shape: AnswerShape, text: str) -> str:
    final = f"{writer.terminals(_CHANNEL, 'final', _MESSAGE)} {shape.content or text}"
    if not shape.tools:
        return final
    to_function = writer.terminals(_CHANNEL, "commentary to=functions.")
    begin_arguments = writer.terminals(_CONSTRAIN, "json", _MESSAGE)
    alternatives = " | ".join(
        f'{writer.terminals(tool.name)} " "? {begin_arguments} {arguments}'
        for tool, arguments in writer.arguments(tools=shape.tools)
    )
    call = f"{to_function} ({alternatives}) {writer.terminals(_CALL)}?"
    if shape.is_required:
        return call
    if shape.content is not None:
        return f"{call} | {final}"
    commentary = writer.terminals(_CHANNEL, "commentary", _MESSAGE)
    preamble = f"{commentary} {text} {writer.terminals(_END, _START, 'assistant')}"
    return f"({preamble})? {call} | {final}"


_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
HARMONY = ToolFormat(_MARKERS, read_message=_read, opened_by=_opened_by)
HARMONY_WITHOUT_CALLS = replace(HARMONY, read_message=partial(_read, with_calls=False))
