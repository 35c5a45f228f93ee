"""The parser of one output: text and token ids in, events out, however the output is split into deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from inflight.errors import ConfigError
from inflight.frontend.agents.formats.base import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    REASONING_MARKERS,
    TOOL_FORMATS,
    CallEmitter,
    ReasoningMarkers,
    ToolFormat,
    reasoning_format_name,
    tool_format_name,
)
from inflight.frontend.agents.formats.harmony import HARMONY_WITHOUT_CALLS
from inflight.frontend.agents.source import (
    ContentDelta,
    Markers,
    ParsedMessage,
    ParserEvent,
    Reading,
    ReasoningDelta,
    Source,
    merge_deltas,
)
from inflight.frontend.text.tokenizer import Tokenizer


class MessageParser:
    """Parses one output: call `feed` for each delta, then `finish`. No output makes it raise.

    It holds text back only while it may become a marker or a call's header, and the white space before these.
    """

    def __init__(
        self,
        tool_format: str | None,
        reasoning_format: str | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tokenizer: Tokenizer | None = None,
        prompt: str = "",
        shaped_content: bool = False,
    ) -> None:
        """Create a parser for formats given by name, None for none. Raises ConfigError for an unknown name.

        With a tokenizer, markers that are its special tokens count only where their token was generated. The end of the
        prompt shows whether the output starts inside a block of reasoning. Constrained content may contain markers as
        text: with `shaped_content` an answer either starts with a call or has none.
        """
        format, reasoning = _tool_format(tool_format, reasoning_format), _reasoning_markers(reasoning_format)
        markers, opened = format.markers, format.opened_by(prompt)
        if reasoning is not None:
            markers = (*markers, *reasoning.markers)
            opened = reasoning.opened_by(prompt) or opened
        self._special = _special_tokens(markers, tokenizer)
        self._source = Source(self._special)
        self._source.push(opened, _special_ids_in(opened, self._special))
        self._reading = _read(self._source, CallEmitter(tools), format, reasoning, shaped_content)

    @property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that a detokenizer must not hide from this parser."""
        return frozenset(self._special)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._source.in_reasoning

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Add the next piece of the output and return the events that are certain now."""
        self._source.push(text, token_ids)
        return self._events()

    def finish(self) -> list[ParserEvent]:
        """Return the remaining events at the end of the output."""
        self._source.end()
        return self._events()

    def parse(self, text: str, token_ids: Sequence[int] = ()) -> ParsedMessage:
        """Parse a complete output."""
        message = ParsedMessage()
        message.add(self.feed(text, token_ids))
        message.add(self.finish())
        return message

    def _events(self) -> list[ParserEvent]:
        events = []
        for event in self._reading:
            if event is None:
                break
            events.append(event)
        return events if len(events) < 2 else merge_deltas(events)


def _read(
    source: Source,
    calls: CallEmitter,
    tool_format: ToolFormat,
    reasoning: ReasoningMarkers | None,
    shaped_content: bool,
) -> Reading[None]:
    """Read a whole output."""
    called = False
    if reasoning is not None:
        called = yield from _read_reasoning(source, calls, tool_format, reasoning)
    if tool_format.read_message is not None:
        yield from tool_format.read_message(source, calls)
        return
    openings, grammar = tool_format.openings.texts, tool_format.grammar
    if grammar is not None and grammar.bare_start and not called:
        yield from _read_calls(source, calls, tool_format, "")
    elif grammar is not None and shaped_content:
        opening = yield from source.accept_after_space(grammar.opening)
        source.unread(len(opening or ""))
        if opening is None:
            openings = ()
    # A special token is never meant to be read, unlike text that spells a marker.
    stray = source.special_spellings.intersection(tool_format.endings)
    around_answer = reasoning.answer if reasoning is not None else ()
    markers = Markers(*openings, *stray.difference(around_answer), *around_answer)
    while (marker := (yield from source.emit_until(markers, ContentDelta, trim=True))) is not None:
        text = marker.lstrip()
        if text in around_answer:
            yield from source.skip_space()
            continue
        if text in stray:
            marker = marker[: -len(text)]
        elif (yield from _read_calls(source, calls, tool_format, text)):
            continue
        if marker:
            yield ContentDelta(marker)


def _read_calls(source: Source, calls: CallEmitter, tool_format: ToolFormat, opening: str) -> Reading[bool]:
    """Read calls and the markers that end them. Return False, and read nothing, if there are none."""
    if not (yield from tool_format.read_calls(source, calls, opening)):
        return False
    while tool_format.endings and (yield from source.accept_after_space(*tool_format.endings)):
        pass
    yield from source.skip_trailing_space()
    return True


def _read_reasoning(
    source: Source, calls: CallEmitter, tool_format: ToolFormat, markers: ReasoningMarkers
) -> Reading[bool]:
    """Read the block of reasoning at the start of an output, if there is one, without surrounding white space.

    Later in the output the markers are text: an answer may be about them. Models may also call tools without ending the
    block: then the calls end it. Return whether they did.
    """
    source.hold()
    yield from source.skip_space()
    if not (yield from source.accept(*markers.opens)):
        source.rewind()
        return False
    source.release()
    source.in_reasoning = True
    # Some models repeat the opening marker of the prompt.
    yield from source.accept_after_space(*markers.opens)
    yield from source.skip_space()
    if markers.label and (yield from source.accept(markers.label)):
        yield from source.skip_space()
    endings = Markers(*markers.closes, *tool_format.openings.texts)
    called = False
    while not called:
        ending = yield from source.emit_until(endings, ReasoningDelta, trim=True)
        if ending is None or ending.endswith(markers.closes):
            break
        for event in _read_calls(source, calls, tool_format, ending.lstrip()):
            if event is not None:
                called, source.in_reasoning = True, False
            yield event
        if not called:
            yield ReasoningDelta(ending)
    source.in_reasoning = False
    if not called or (yield from source.accept_after_space(*markers.closes)):
        yield from source.skip_space()
    return called


@cache
def _tool_format(name: str | None, reasoning_format: str | None) -> ToolFormat:
    format_name = tool_format_name(name)
    if format_name is not None:
        return TOOL_FORMATS.get(format_name)
    is_harmony = reasoning_format_name(reasoning_format) == HARMONY_REASONING
    return HARMONY_WITHOUT_CALLS if is_harmony else ToolFormat()


def _reasoning_markers(name: str | None) -> ReasoningMarkers | None:
    name = reasoning_format_name(name)
    if name is not None and name not in REASONING_FORMATS:
        allowed = ", ".join(REASONING_FORMATS)
        raise ConfigError(f"unknown reasoning parser {name!r}: choose one of {allowed}")
    return None if name is None else REASONING_MARKERS.get(name)


def _special_tokens(markers: Sequence[str], tokenizer: Tokenizer | None) -> dict[int, str]:
    """Return the markers that are special tokens, by their ids."""
    if tokenizer is None:
        return {}
    ids = {marker: tokenizer.token_id(marker) for marker in markers}
    return {
        token_id: marker
        for marker, token_id in ids.items()
        if token_id is not None and token_id in tokenizer.special_ids
    }


def _special_ids_in(text: str, special: Mapping[int, str]) -> list[int]:
    """Return the ids of the special tokens that the text spells, in order."""
    ids = {spelling: token_id for token_id, spelling in special.items()}
    return [ids[spelling] for spelling in Markers(*ids).pattern.findall(text)]
