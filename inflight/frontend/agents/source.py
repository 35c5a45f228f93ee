"""The text of an output as it arrives, the primitives with which formats read it, and the events that they emit.

A format is read by a generator that looks like a parser of complete text. Where it needs a character that has not
arrived yet, it yields None and is resumed when there is more. So no format knows how the text was split into deltas,
and none can depend on it.

SpeculationConfig reading (is this the start of a call, or only text that looks like one?) happens between `hold` and
`release` or `rewind`. It is limited to a number of characters, after which the text appears to end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

MAX_CALL_HEADER = 1024  # characters within which a call must be recognizable as one
MAX_TRIMMED_SPACE = 64  # characters of white space before a marker that count as part of it
_CHUNK = 4096
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]*")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The start of a tool call. `id` is the model's own id for the call, in formats that have one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The end of a tool call. `complete` is false if the output ended or violated the format inside the call."""

    index: int
    complete: bool


ParserEvent = ContentDelta | ReasoningDelta | ToolCallBegun | ArgumentsDelta | ToolCallEnded
T = TypeVar("T")
Reading = Generator[ParserEvent | None, None, T]  # None means that it waits for more text


def merge_deltas(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """Return the events with consecutive deltas of the same kind merged into one."""
    merged: list[ParserEvent] = []
    for _, group in groupby(events, type):
        same_kind = list(group)
        deltas = [event for event in same_kind if not isinstance(event, ToolCallBegun | ToolCallEnded)]
        if deltas:
            merged.append(replace(deltas[0], text="".join(delta.text for delta in deltas)))
        else:
            merged += same_kind
    return merged


@dataclass(slots=True)
class CalledFunction:
    """One tool call of a message."""

    name: str
    arguments: str = ""  # JSON text
    id: str | None = None
    complete: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """The message that the events so far add up to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[CalledFunction] = field(default_factory=list)

    def add(self, events: Iterable[ParserEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallBegun(_, name, id):
                    self.tool_calls.append(CalledFunction(name, id=id))
                case ArgumentsDelta(index, text):
                    self.tool_calls[index].arguments += text
                case ToolCallEnded(index, complete):
                    self.tool_calls[index].complete = complete


class Markers:
    """Texts that are searched for together. None of them may be a prefix of another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._first = re.compile("|".join(re.escape(text[0]) for text in texts) or "(?!)")
        self._prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest_prefix = max(map(len, texts), default=1) - 1

    def partial_start(self, text: str, start: int, end: int) -> int:
        """Return where a marker may have begun that later text could complete, or `end` if nowhere."""
        for first in self._first.finditer(text, max(start, end - self._longest_prefix), end):
            if text[first.start() : end] in self._prefixes:
                return first.start()
        return end


class Source:
    """An output's text in order, part of which has yet to arrive.

    Markers that are special tokens of the model count only where their token was generated: `special` maps those
    tokens to their text. Text that merely spells a special token is text.
    """

    def __init__(self, special: Mapping[int, str] | None = None) -> None:
        self._special = dict(special or {})
        self.special_spellings = frozenset(self._special.values())
        self._text = ""
        self._position = 0  # index into the text
        # Characters dropped before the text. The positions below count from the start of the output.
        self._base = 0
        self._ended = False
        self._mark: int | None = None  # the position that `rewind` returns to
        self._limit: int | None = None  # the position where the text appears to end while it is held
        self._awaited: deque[str] = deque()  # special tokens that arrived before their text
        self._searched = 0  # the position up to which special tokens have been located
        self._token_positions: set[int] = set()  # of special tokens
        self.in_reasoning = False  # set by the reader of a block of reasoning

    def push(self, text: str, token_ids: Sequence[int] = ()) -> None:
        if self._mark is None:
            self._base += self._position
            self._text, self._position = self._text[self._position :] + text, 0
        else:
            self._text += text
        if not self._special:
            return
        if not self._awaited:
            self._searched = max(self._searched, self._base + len(self._text) - len(text))
        self._awaited += (self._special[token_id] for token_id in token_ids if token_id in self._special)
        while self._awaited:
            index = self._text.find(self._awaited[0], max(self._searched - self._base, 0))
            if index < 0:
                break
            self._token_positions.add(self._base + index)
            self._searched = self._base + index + len(self._awaited.popleft())

    def end(self) -> None:
        """Declare that no more text will come."""
        self._ended = True

    def hold(self, limit: int = MAX_CALL_HEADER) -> None:
        """Remember this position for `rewind`."""
        self._mark = self._base + self._position
        self._limit = self._mark + limit

    def release(self) -> None:
        """Accept everything read since `hold`."""
        self._mark = self._limit = None

    def rewind(self) -> None:
        """Return to the position of `hold`, as if nothing had been read since."""
        assert self._mark is not None
        self._position = self._mark - self._base
        self.release()

    def unread(self, count: int) -> None:
        """Put the last `count` characters back."""
        self._position -= count

    @property
    def _end(self) -> int:
        return len(self._text) if self._limit is None else min(len(self._text), self._limit - self._base)

    @property
    def _over(self) -> bool:
        """Whether nothing comes after `_end`."""
        return self._ended or (self._limit is not None and self._limit <= self._base + len(self._text))

    def _has_its_tokens(self, start: int, marker: str) -> bool:
        """Return whether every special token that the marker spells was generated as a token there."""
        for spelling in self._special.values():
            offset = marker.find(spelling)
            if offset >= 0 and self._base + start + offset not in self._token_positions:
                return False
        return True

    def peek(self) -> Reading[str]:
        """Return the next character, or "" at the end."""
        while self._position >= self._end:
            if self._over:
                return ""
            yield None
        return self._text[self._position]

    def available(self) -> str:
        """Return text that can be read without waiting, in bounded chunks so that the copies do not add up."""
        return self._text[self._position : min(self._end, self._position + _CHUNK)]

    def take(self, count: int) -> str:
        """Read the next characters, which must be available."""
        self._position += count
        return self._text[self._position - count : self._position]

    def accept(self, *texts: str) -> Reading[str | None]:
        """Read and return the one of these texts that comes next, or return None if none does."""
        longest = max(map(len, texts))
        while True:
            for text in texts:
                if self._text.startswith(text, self._position, self._end) and self._has_its_tokens(
                    self._position, text
                ):
                    self._position += len(text)
                    return text
            rest = self._text[self._position : min(self._end, self._position + longest)]
            if self._over or not any(text.startswith(rest) and text != rest for text in texts):
                return None
            yield None

    def skip_space(self) -> Reading[None]:
        yield from self.take_while(_SPACES)

    def accept_after_space(self, *texts: str) -> Reading[str | None]:
        """Like `accept`, after optional white space. Nothing is read if none of the texts follows."""
        self.hold()
        yield from self.skip_space()
        accepted = yield from self.accept(*texts)
        if accepted is None:
            self.rewind()
        else:
            self.release()
        return accepted

    def skip_trailing_space(self) -> Reading[None]:
        """Read white space if the output ends after it."""
        self.hold()
        yield from self.skip_space()
        if (yield from self.peek()):
            self.rewind()
        else:
            self.release()

    def take_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest run that matches the pattern, which must be a repeated character class."""
        parts = []
        while True:
            match = pattern.match(self._text, self._position, self._end)
            assert match is not None
            parts.append(match.group())
            self._position = match.end()
            if self._position < self._end or self._over:
                return "".join(parts)
            yield None

    def emit_until(
        self, markers: Markers, event: Callable[[str], ParserEvent], *, trim: bool = False
    ) -> Reading[str | None]:
        """Emit the text up to the next marker, then read and return the marker; None at the end of the text.

        With `trim`, white space before the marker belongs to it and is returned with it.
        """
        while True:
            text, marker = self._before(markers, trim)
            if text:
                yield event(text)
            if marker is not None or self._over:
                return marker
            yield None

    def take_until(self, markers: Markers) -> Reading[tuple[str, str | None]]:
        """Return the text up to the next marker, and the marker; None at the end of the text."""
        parts = []
        while True:
            text, marker = self._before(markers, trim=False)
            parts.append(text)
            if marker is not None or self._over:
                return "".join(parts), marker
            yield None

    def _before(self, markers: Markers, trim: bool) -> tuple[str, str | None]:
        """Read what certainly precedes the next marker, and the marker if it has arrived."""
        text, start, end = self._text, self._position, self._end
        match = markers.pattern.search(text, start, end)
        while match is not None and not self._has_its_tokens(match.start(), match.group()):
            match = markers.pattern.search(text, match.start() + 1, end)
        certain = end if self._over else markers.partial_start(text, start, end)
        if match is not None and match.start() < certain:
            stop, self._position = match.start(), match.end()
        elif self._over:
            self._position = end
            return text[start:end], None
        else:
            stop = self._position = certain
            match = None
        if trim:
            trim_start = max(start, stop - MAX_TRIMMED_SPACE)
            stop = trim_start + len(text[trim_start:stop].rstrip(_SPACE))
        if match is None:
            self._position = stop
            return text[start:stop], None
        return text[start:stop], text[stop : self._position]
