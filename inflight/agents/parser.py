"""The parser of one output: text and token ids in, events out, however the output is split into deltas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.agents.formats.base import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    REASONING_MARKERS,
    TOOL_FORMATS,
    CallEmitter,
    ReasoningMarkers,
    ToolFormat,
)
from inflight.agents.formats.harmony import HARMONY_WITHOUT_CALLS
from inflight.agents.reading import (
    ContentDelta,
    Markers,
    ParsedMessage,
    ParserEvent,
    Reading,
    ReasoningDelta,
    Source,
    merge_deltas,
)
from inflight.errors import ConfigError
from inflight.text import Tokenizer


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
            markers = (*markers, reasoning.open, reasoning.close)
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

    def runs(self, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split the ids of a delta so that each of `marker_ids` is in a piece of its own.

        If the pieces are fed one by one with their text, it is unambiguous where in the text a marker is a token.
        """
        start = 0
        for at, token_id in enumerate(token_ids):
            if token_id in self._special:
                if start < at:
                    yield token_ids[start:at]
                yield token_ids[at : at + 1]
                start = at + 1
        if start < len(token_ids):
            yield token_ids[start:]

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
    if reasoning is not None:
        yield from _read_reasoning(source, reasoning, tool_format.ends_reasoning)
    if tool_format.read_message is not None:
        yield from tool_format.read_message(source, calls)
        return
    openings, grammar = tool_format.openings, tool_format.grammar
    if grammar is not None and grammar.bare_start:
        yield from tool_format.read_calls(source, calls, "")
    elif grammar is not None and shaped_content:
        opening = yield from source.accept_after_space(grammar.opening)
        source.unread(len(opening or ""))
        if opening is None:
            openings = Markers()
    while (opening := (yield from source.emit_until(openings, ContentDelta, trim=True))) is not None:
        if not (yield from tool_format.read_calls(source, calls, opening.lstrip())):
            yield ContentDelta(opening)


def _read_reasoning(source: Source, markers: ReasoningMarkers, also_ends: tuple[str, ...]) -> Reading[None]:
    """Read the block of reasoning at the start of an output, if there is one, without surrounding white space.

    Later in the output the markers are text: an answer may be about them. The markers in `also_ends` end the block too,
    and are left for the next reader.
    """
    source.hold()
    yield from source.skip_space()
    if not (yield from source.accept(markers.open)):
        source.rewind()
        return
    source.release()
    source.in_reasoning = True
    yield from source.accept_after_space(markers.open)  # some models repeat the opening marker of the prompt
    yield from source.skip_space()
    ending = yield from source.emit_until(Markers(markers.close, *also_ends), ReasoningDelta, trim=True)
    source.in_reasoning = False
    if ending is not None and not ending.endswith(markers.close):
        source.unread(len(ending.lstrip()))
    yield from source.skip_space()


def _tool_format(name: str | None, reasoning_format: str | None) -> ToolFormat:
    if name is not None:
        return TOOL_FORMATS.get(name)
    return HARMONY_WITHOUT_CALLS if reasoning_format == HARMONY_REASONING else ToolFormat()


def _reasoning_markers(name: str | None) -> ReasoningMarkers | None:
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
