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
from inflight.agents.json_text import read_value
from inflight.agents.source import Markers, Reading, Source
from inflight.agents.tool_format import ToolFormat

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
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


_MARKERS = (_START, _CHANNEL, "<|constrain|>", _MESSAGE, *_ENDS)
HARMONY = ToolFormat(_read, _MARKERS, opened=_opened)
HARMONY_WITHOUT_CALLS = ToolFormat(_read_channels, _MARKERS, opened=_opened)
