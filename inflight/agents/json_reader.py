"""JSON in a text that is still arriving: where a value ends, and what a string says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from inflight.agents.calls import Calls
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


MAX_HELD = 16_384  # characters: arguments may come before the name
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "index")  # members that some models add


@dataclass(slots=True)
class _Members:
    """What is known of a call before its arguments are read."""

    name: str | None = None
    id: str | None = None
    arguments: str | None = None  # where they came before the name
    closed: bool = False  # the object has ended


def read_json_call(
    source: Source, calls: Calls, *, separator: str = "", only_known: bool = False
) -> Reading[bool]:
    """One call, after white space and, where it comes, the separator. False if there is none; then nothing was read.

    `only_known`: only the name of a tool makes it a call.
    """
    source.hold(MAX_HELD)
    yield from source.skip_space()
    if separator and (yield from source.accept(separator)):
        yield from source.skip_space()
    members = yield from _members(source)
    if members is None or not members.name or (only_known and not calls.may_call(members.name)):
        source.rewind()
        return False
    source.release()
    yield calls.begin(members.name, members.id)
    if members.closed:
        if members.arguments is not None:
            inner = Source()
            inner.push(members.arguments)
            inner.end()
            yield from read_arguments(inner, calls)
        yield from calls.end()
    else:
        complete = yield from read_arguments(source, calls)
        yield from calls.end(complete)
        if complete:
            yield from _skip_rest(source)
    return True


def read_arguments(source: Source, calls: Calls) -> Reading[bool]:
    """The JSON text of arguments. False where it was broken off."""
    sign = yield from source.peek()
    if sign == '"':  # JSON within JSON
        return (yield from read_string(source, calls.arguments))
    if sign and sign in "{[":
        return (yield from read_value(source, calls.arguments))
    text = yield from take_value(source)
    if text and text not in ("null", "None"):
        yield calls.arguments(text)
    return bool(text)


def _members(source: Source) -> Reading[_Members | None]:
    """Read up to the arguments of a call whose name is known, or to the end of the object."""
    members = _Members()
    if not (yield from source.accept("{")):
        return None
    while True:
        yield from source.skip_space()
        key = yield from take_string(source)
        if key is None or not (yield from _colon(source)):
            return None
        if key in _ARGUMENTS and members.name is not None:
            return members
        if not (yield from _member(source, members, key)):
            return None
        yield from source.skip_space()
        sign = yield from source.accept(",", "}")
        if sign is None:
            return None
        if sign == "}":
            members.closed = True
            return members


def _member(source: Source, members: _Members, key: str) -> Reading[bool]:
    if key == "name":
        members.name = yield from take_string(source)
        return members.name is not None
    if key == "id" and (yield from source.peek()) == '"':
        members.id = yield from take_string(source)
        return members.id is not None
    if key not in _ARGUMENTS and key not in _OTHERS:
        return False
    value = yield from take_value(source)
    if key in _ARGUMENTS:
        members.arguments = value
    return bool(value)


def _colon(source: Source) -> Reading[bool]:
    yield from source.skip_space()
    found = yield from source.accept(":")
    yield from source.skip_space()
    return found is not None


def _skip_rest(source: Source) -> Reading[None]:
    """Read what an object has after the arguments. Where it goes on as no object does, that is left."""
    while True:
        source.hold()
        yield from source.skip_space()
        sign = yield from source.accept(",", "}")
        if sign == ",":
            yield from source.skip_space()
            if (
                (yield from take_string(source))
                and (yield from _colon(source))
                and (yield from take_value(source))
            ):
                source.release()
                continue
        if sign == "}":
            source.release()
        else:
            source.rewind()
        return
