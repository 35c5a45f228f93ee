"""JSON in a text that is still arriving: where a value ends, and what a string says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from inflight.agents.events import ParserEvent
from inflight.agents.source import Reading, Source

# What matters between strings. No JSON has a `<` there, nor an underscore, but the markers of formats do.
_OUTSIDE = re.compile(r'["{}\[\]<]')
_OUTSIDE_STRICT = re.compile(r'["{}\[\]<_]')
_SCALAR_END = re.compile(r"[\s,}\]<]")
_IN_STRING = re.compile(r'["\\]')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = "0123456789abcdefABCDEF"


class JsonExtent:
    """Finds the end of the value that a text begins with. The value need not be valid, only balanced."""

    def __init__(self, strict: bool = False) -> None:
        self._outside = _OUTSIDE_STRICT if strict else _OUTSIDE
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False  # neither a string nor a container
        self._begun = False
        self.done = False
        self.whole = False  # done, and not broken off by what is no JSON

    def advance(self, text: str) -> int:
        """How many of the next characters belong to the value."""
        at = 0
        if text and not self._begun:
            self._begun = True
            self._scalar = text[0] not in '"{['
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                at = self._string(text, at)
            elif self._scalar:
                found = _SCALAR_END.search(text, at)
                self.done = self.whole = found is not None
                at = len(text) if found is None else found.start()
            else:
                at = self._between(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found.group() == "\\"
        if not self._escaped:
            self._in_string = False
            self.done = self.whole = self._depth == 0
        return found.end()

    def _between(self, text: str, at: int) -> int:
        found = self._outside.search(text, at)
        if found is None:
            return len(text)
        sign = found.group()
        if sign in "<_":
            self.done = True
            return found.start()
        if sign == '"':
            self._in_string = True
        else:
            self._depth += 1 if sign in "{[" else -1
            self.done = self.whole = self._depth <= 0
        return found.end()


def read_value(source: Source, event: Callable[[str], ParserEvent]) -> Reading[bool]:
    """Tell a value as it comes, letter by letter. False where it was broken off."""
    extent = JsonExtent()
    while not extent.done:
        if not (yield from source.peek()):
            return False
        text = source.take(extent.advance(source.available()))
        if text:
            yield event(text)
    return extent.whole


def take_value(source: Source) -> Reading[str | None]:
    """A whole value; None where it was broken off.

    Strict, since it is read on trial: what began at every marker of a text must not go on to the end each time.
    """
    extent = JsonExtent(strict=True)
    parts = []
    while not extent.done:
        if not (yield from source.peek()):
            return None
        parts.append(source.take(extent.advance(source.available())))
    return "".join(parts) if extent.whole else None


def take_string(source: Source) -> Reading[str | None]:
    """What a string says; None where there is none, or no valid one."""
    if (yield from source.peek()) != '"':
        return None
    text = yield from take_value(source)
    try:
        said = json.loads(text or "", strict=False)
        said.encode()  # no lone surrogates
    except ValueError:
        return None
    assert isinstance(said, str)
    return said


def read_string(source: Source, event: Callable[[str], ParserEvent]) -> Reading[bool]:
    """Tell what a string says, as it comes. False where it was broken off."""
    source.take(1)  # the quote
    while sign := (yield from source.peek()):
        if sign == '"':
            source.take(1)
            return True
        if sign == "\\":
            text = yield from _escape(source)
        else:
            plain = _PLAIN.match(source.available())
            assert plain is not None
            text = source.take(plain.end())
        yield event(text)
    return False


def _escape(source: Source) -> Reading[str]:
    source.take(1)  # the backslash
    letter = yield from source.peek()
    source.take(len(letter))
    if letter != "u":
        return _ESCAPES.get(letter, letter)
    code = yield from _four_digits(source)
    if 0xD800 <= code < 0xDC00 and (yield from source.accept("\\u")):
        low = yield from _four_digits(source)
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else 0xD800
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


def _four_digits(source: Source) -> Reading[int]:
    digits = ""
    while len(digits) < 4 and (digit := (yield from source.peek())) and digit in _HEX_DIGITS:
        digits += source.take(1)
    return int(digits, 16) if digits else 0xD800
