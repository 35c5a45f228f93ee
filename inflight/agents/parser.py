"""The parser of one output: text and token ids in, events out, however the output is cut into deltas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta, ParsedMessage, ParserEvent, joined
from inflight.agents.formats.base import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    THINKING,
    TOOL_FORMATS,
    ThinkingMarkers,
    ToolFormat,
    read_thinking,
)
from inflight.agents.formats.harmony import HARMONY_WITHOUT_CALLS
from inflight.agents.source import Markers, Reading, Source
from inflight.errors import ConfigError
from inflight.text import Tokenizer


class MessageParser:
    """Feed it what comes, then `finish`. It never raises, whatever the model says.

    Of text it holds back only what may yet become a marker or the head of a call, and white space before these.
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
        """Formats by name, None for none. Raises ConfigError for a name that there is not.

        With a tokenizer, markers that are special tokens of it count only where their token came. The prompt tells
        whether the output starts inside a block of reasoning; only its end is looked at. Content that has to have a
        shape may hold markers as text: with `shaped_content` an answer begins with a call or has none.
        """
        tool_reader, thinking = _tool_format(tool_format, reasoning_format), _thinking(reasoning_format)
        markers, opened = tool_reader.markers, tool_reader.opened(prompt)
        if thinking is not None:
            markers, opened = (*markers, thinking.open, thinking.close), thinking.opened(prompt) or opened
        self._special = _special_tokens(markers, tokenizer)
        self._source = Source(self._special)
        self._source.push(opened, _ids_in(opened, self._special))
        self._reading = _read(self._source, Calls(tools), tool_reader, thinking, shaped_content)

    @property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that a detokenizer must not hide from this parser."""
        return frozenset(self._special)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._source.in_reasoning

    def runs(self, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """The ids of a delta in pieces, with each of `marker_ids` in a piece of its own.

        Fed one after the other, with the text of each, they leave no doubt where in the text a marker is a token.
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
        """What the next piece of the output says, as far as it is certain."""
        self._source.push(text, token_ids)
        return self._events()

    def finish(self) -> list[ParserEvent]:
        """The rest, at the end of the output."""
        self._source.end()
        return self._events()

    def parse(self, text: str, token_ids: Sequence[int] = ()) -> ParsedMessage:
        """A whole output at once."""
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
        return events if len(events) < 2 else joined(events)


def _read(
    source: Source,
    calls: Calls,
    tool_format: ToolFormat,
    thinking: ThinkingMarkers | None,
    shaped_content: bool,
) -> Reading[None]:
    if thinking is not None:
        yield from read_thinking(source, thinking, tool_format.ends_reasoning)
    grammar = tool_format.grammar
    if shaped_content and grammar is not None and not grammar.bare:
        opening = yield from source.accept_after_space(grammar.opening)
        if opening is None:
            yield from _read_content(source, calls)
            return
        source.back(len(opening))
    yield from tool_format.read(source, calls)


def _read_content(source: Source, _: Calls) -> Reading[None]:
    yield from source.until(Markers(), ContentDelta)


def _tool_format(name: str | None, reasoning_format: str | None) -> ToolFormat:
    if name is not None:
        return TOOL_FORMATS.get(name)
    return HARMONY_WITHOUT_CALLS if reasoning_format == HARMONY_REASONING else ToolFormat(_read_content, ())


def _thinking(name: str | None) -> ThinkingMarkers | None:
    if name is not None and name not in REASONING_FORMATS:
        allowed = ", ".join(REASONING_FORMATS)
        raise ConfigError(f"unknown reasoning parser {name!r}: choose one of {allowed}")
    return None if name is None else THINKING.get(name)


def _special_tokens(markers: Sequence[str], tokenizer: Tokenizer | None) -> dict[int, str]:
    if tokenizer is None:
        return {}
    ids = {marker: tokenizer.token_id(marker) for marker in markers}
    return {
        token_id: marker
        for marker, token_id in ids.items()
        if token_id is not None and token_id in tokenizer.special_ids
    }


def _ids_in(text: str, special: Mapping[int, str]) -> list[int]:
    """The special tokens of a text that is known to have them as tokens, in its order."""
    ids = {spelling: token_id for token_id, spelling in special.items()}
    return [ids[found] for found in Markers(*ids).pattern.findall(text)]
