"""The text of an output as it arrives, and the few ways in which formats read it.

A format is read by a generator that looks like a parser of whole texts. Wherever it needs a character that has not come
yet, it yields None, and is resumed when there is more. So no format knows how the text was cut into deltas, and none
can depend on it.

Reading that may turn out to be a mistake (is this the beginning of a call, or only a text that looks like one?) stands
between `hold` and `release` or `rewind`. It goes on for a bounded number of characters: beyond them the text seems to
end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from inflight.agents.events import ParserEvent

MAX_HEAD = 1024  # characters before a call must have shown that it is one
MAX_TRIMMED = 64  # characters of white space before a marker that are taken for a part of it
_CHUNK = 4096

T = TypeVar("T")
Reading = Generator[ParserEvent | None, None, T]  # None: there is nothing to do until more text comes

_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]*")


class Markers:
    """Texts that are looked for together. None of them may begin with another."""

    def __init__(self, *texts: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._first = re.compile("|".join(re.escape(text[0]) for text in texts) or "(?!)")
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, texts), default=1) - 1  # beginning

    def hold_from(self, text: str, start: int, end: int) -> int:
        """Where a marker may have begun that the rest of the text will complete; `end` if nowhere."""
        for first in self._first.finditer(text, max(start, end - self._longest), end):
            if text[first.start() : end] in self._beginnings:
                return first.start()
        return end


class Source:
    """Text in order, of which some is still to come.

    Markers that are special tokens of the model count only where their token came: `special` has their ids and
    spellings. A text that only spells one is text.
    """

    def __init__(self, special: Mapping[int, str] | None = None) -> None:
        self._special = dict(special or {})
        self._text = ""
        self._at = 0  # in the text
        self._base = (
            0  # characters dropped before it; positions below are counted from the output's beginning
        )
        self._ended = False
        self._mark: int | None = None  # where `rewind` goes
        self._limit: int | None = None  # where the text seems to end while it is held
        self._awaited: deque[str] = deque()  # special tokens that came before their text
        self._searched = 0  # the position up to which special tokens have been found
        self._real: set[int] = set()  # positions of special tokens
        self.in_reasoning = False  # set by those who read it, for those who count its tokens

    def push(self, text: str, token_ids: Sequence[int] = ()) -> None:
        if self._mark is None:
            self._base += self._at
            self._text, self._at = self._text[self._at :] + text, 0
        else:
            self._text += text
        if not self._special:
            return
        if not self._awaited:
            self._searched = max(self._searched, self._base + len(self._text) - len(text))
        self._awaited += (self._special[token_id] for token_id in token_ids if token_id in self._special)
        while self._awaited:
            found = self._text.find(self._awaited[0], max(self._searched - self._base, 0))
            if found < 0:
                break
            self._real.add(self._base + found)
            self._searched = self._base + found + len(self._awaited.popleft())

    def end(self) -> None:
        """There will be no more."""
        self._ended = True

    def hold(self, limit: int = MAX_HEAD) -> None:
        """Remember this place, for `rewind`."""
        self._mark = self._base + self._at
        self._limit = self._mark + limit

    def release(self) -> None:
        """What was read since `hold` was no mistake."""
        self._mark = self._limit = None

    def rewind(self) -> None:
        """Back to `hold`, as if nothing had been read since."""
        assert self._mark is not None
        self._at = self._mark - self._base
        self.release()

    def back(self, count: int) -> None:
        """Let the last characters that were read be read again."""
        self._at -= count

    @property
    def _end(self) -> int:
        return len(self._text) if self._limit is None else min(len(self._text), self._limit - self._base)

    @property
    def _over(self) -> bool:
        """Whether nothing comes after `_end`."""
        return self._ended or (self._limit is not None and self._limit <= self._base + len(self._text))

    def _is_real(self, start: int, marker: str) -> bool:
        for spelling in self._special.values():
            offset = marker.find(spelling)
            if offset >= 0 and self._base + start + offset not in self._real:
                return False
        return True

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self._at >= self._end:
            if self._over:
                return ""
            yield None
        return self._text[self._at]

    def available(self) -> str:
        """What can be read without waiting, or the beginning of it: a copy of it all for each call would add up."""
        return self._text[self._at : min(self._end, self._at + _CHUNK)]

    def take(self, count: int) -> str:
        """The next characters, of those that are available."""
        self._at += count
        return self._text[self._at - count : self._at]

    def accept(self, *texts: str) -> Reading[str | None]:
        """The one of these that comes next, which is then read; None if none does."""
        longest = max(map(len, texts))
        while True:
            for text in texts:
                if self._text.startswith(text, self._at, self._end) and self._is_real(self._at, text):
                    self._at += len(text)
                    return text
            rest = self._text[self._at : min(self._end, self._at + longest)]
            if self._over or not any(text.startswith(rest) and text != rest for text in texts):
                return None
            yield None

    def skip_space(self) -> Reading[None]:
        yield from self.take_while(_SPACES)

    def accept_after_space(self, *texts: str) -> Reading[str | None]:
        """The one of these that comes next but for white space; if none does, nothing is read."""
        self.hold()
        yield from self.skip_space()
        found = yield from self.accept(*texts)
        if found is None:
            self.rewind()
        else:
            self.release()
        return found

    def skip_last_space(self) -> Reading[None]:
        """Read white space if nothing comes after it."""
        self.hold()
        yield from self.skip_space()
        if (yield from self.peek()):
            self.rewind()
        else:
            self.release()

    def take_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All that comes before the first character that the pattern, a repeated class of them, does not allow."""
        parts = []
        while True:
            found = pattern.match(self._text, self._at, self._end)
            assert found is not None
            parts.append(found.group())
            self._at = found.end()
            if self._at < self._end or self._over:
                return "".join(parts)
            yield None

    def until(
        self, markers: Markers, event: Callable[[str], ParserEvent], *, trim: bool = False
    ) -> Reading[str | None]:
        """Tell the text up to the next marker, and read that too. Returns the marker, None at the end of the text.

        With `trim`, white space before the marker belongs to it, and is returned with it.
        """
        while True:
            text, marker = self._before(markers, trim)
            if text:
                yield event(text)
            if marker is not None or self._over:
                return marker
            yield None

    def text_until(self, markers: Markers) -> Reading[tuple[str, str | None]]:
        """The text up to the next marker, and that; None at the end of the text."""
        parts = []
        while True:
            text, marker = self._before(markers, trim=False)
            parts.append(text)
            if marker is not None or self._over:
                return "".join(parts), marker
            yield None

    def _before(self, markers: Markers, trim: bool) -> tuple[str, str | None]:
        """Read what surely comes before the next marker, and the marker if it is there."""
        text, start, end = self._text, self._at, self._end
        found = markers.pattern.search(text, start, end)
        while found is not None and not self._is_real(found.start(), found.group()):
            found = markers.pattern.search(text, found.start() + 1, end)
        hold = end if self._over else markers.hold_from(text, start, end)
        if found is not None and found.start() < hold:
            stop, self._at = found.start(), found.end()
        elif self._over:
            self._at = end
            return text[start:end], None
        else:
            stop = self._at = hold
            found = None
        if trim:
            kept = len(text[max(start, stop - MAX_TRIMMED) : stop].rstrip(_SPACE))
            stop = max(start, stop - MAX_TRIMMED) + kept
        if found is None:
            self._at = stop
            return text[start:stop], None
        return text[start:stop], text[stop : self._at]
