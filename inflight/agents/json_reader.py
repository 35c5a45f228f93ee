"""JSON that is still arriving: values, strings, and calls of the form `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from inflight.agents.calls import CallEmitter
from inflight.agents.events import ParserEvent
from inflight.agents.source import Reading, Source

MAX_JSON_HEADER = 16_384  # characters: the arguments may come before the name
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "index")  # members that some models add

# The characters that matter outside strings. Valid JSON has no `<` or underscore there, but the markers of formats do.
_OUTSIDE = re.compile(r'["{}\[\]<]')
_OUTSIDE_STRICT = re.compile(r'["{}\[\]<_]')
_SCALAR_END = re.compile(r"[\s,}\]<]")
_IN_STRING = re.compile(r'["\\]')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = "0123456789abcdefABCDEF"


class JsonScanner:
    """Finds the end of the value at the start of a text. The value only needs to be balanced, not valid."""

    def __init__(self, strict: bool = False) -> None:
        self._outside = _OUTSIDE_STRICT if strict else _OUTSIDE
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False  # neither a string nor a container
        self._begun = False
        self.done = False
        self.whole = False  # done, and not cut short by something that is not JSON

    def advance(self, text: str) -> int:
        """Return how many of the next characters belong to the value."""
        at = 0
        if text and not self._begun:
            self._begun = True
            self._scalar = text[0] not in '"{['
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                at = self._scan_string(text, at)
            elif self._scalar:
                end = _SCALAR_END.search(text, at)
                self.done = self.whole = end is not None
                at = len(text) if end is None else end.start()
            else:
                at = self._scan_structure(text, at)
        return at

    def _scan_string(self, text: str, at: int) -> int:
        match = _IN_STRING.search(text, at)
        if match is None:
            return len(text)
        self._escaped = match.group() == "\\"
        if not self._escaped:
            self._in_string = False
            self.done = self.whole = self._depth == 0
        return match.end()

    def _scan_structure(self, text: str, at: int) -> int:
        match = self._outside.search(text, at)
        if match is None:
            return len(text)
        character = match.group()
        if character in "<_":
            self.done = True
            return match.start()
        if character == '"':
            self._in_string = True
        else:
            self._depth += 1 if character in "{[" else -1
            self.done = self.whole = self._depth <= 0
        return match.end()


def emit_value(source: Source, event: Callable[[str], ParserEvent]) -> Reading[bool]:
    """Emit the text of a value as it arrives. Return False if it is cut short."""
    scanner = JsonScanner()
    while not scanner.done:
        if not (yield from source.peek()):
            return False
        text = source.take(scanner.advance(source.available()))
        if text:
            yield event(text)
    return scanner.whole


def take_value(source: Source) -> Reading[str | None]:
    """Return the text of a whole value, or None if it is cut short.

    This reads speculatively, hence strictly: an attempt at each marker of a text must not run to the text's end.
    """
    scanner = JsonScanner(strict=True)
    parts = []
    while not scanner.done:
        if not (yield from source.peek()):
            return None
        parts.append(source.take(scanner.advance(source.available())))
    return "".join(parts) if scanner.whole else None


def take_string(source: Source) -> Reading[str | None]:
    """Return the contents of a string, or None if no valid string comes next."""
    if (yield from source.peek()) != '"':
        return None
    text = yield from take_value(source)
    try:
        string = json.loads(text or "", strict=False)
        string.encode()  # fails on lone surrogates
    except ValueError:
        return None
    assert isinstance(string, str)
    return string


def emit_string(source: Source, event: Callable[[str], ParserEvent]) -> Reading[bool]:
    """Emit the contents of a string as it arrives. Return False if it is cut short."""
    source.take(1)  # the quote
    while character := (yield from source.peek()):
        if character == '"':
            source.take(1)
            return True
        if character == "\\":
            text = yield from _take_escape(source)
        else:
            plain = _PLAIN.match(source.available())
            assert plain is not None
            text = source.take(plain.end())
        yield event(text)
    return False


def _take_escape(source: Source) -> Reading[str]:
    source.take(1)  # the backslash
    letter = yield from source.peek()
    source.take(len(letter))
    if letter != "u":
        return _ESCAPES.get(letter, letter)
    code = yield from _take_four_digits(source)
    if 0xD800 <= code < 0xDC00 and (yield from source.accept("\\u")):
        low = yield from _take_four_digits(source)
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else 0xD800
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


def _take_four_digits(source: Source) -> Reading[int]:
    digits = ""
    while len(digits) < 4 and (digit := (yield from source.peek())) and digit in _HEX_DIGITS:
        digits += source.take(1)
    return int(digits, 16) if digits else 0xD800


@dataclass(slots=True)
class _CallMembers:
    """The members of a call's object that precede its streamed arguments."""

    name: str | None = None
    id: str | None = None
    arguments: str | None = None  # if they came before the name
    closed: bool = False  # the object has ended


def read_json_call(
    source: Source, calls: CallEmitter, *, separator: str = "", only_known: bool = False
) -> Reading[bool]:
    """Read one call, after optional white space and separator. Return False, and read nothing, if there is none.

    With `only_known`, an object is a call only if it names one of the request's tools.
    """
    source.hold(MAX_JSON_HEADER)
    yield from source.skip_space()
    if separator and (yield from source.accept(separator)):
        yield from source.skip_space()
    members = yield from _take_members(source)
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
            yield from emit_arguments(inner, calls)
        yield from calls.end()
    else:
        complete = yield from emit_arguments(source, calls)
        yield from calls.end(complete)
        if complete:
            yield from _skip_remaining_members(source)
    return True


def emit_arguments(source: Source, calls: CallEmitter) -> Reading[bool]:
    """Emit the JSON text of a call's arguments. Return False if it is cut short."""
    character = yield from source.peek()
    if character == '"':  # JSON encoded as a JSON string
        return (yield from emit_string(source, calls.arguments))
    if character and character in "{[":
        return (yield from emit_value(source, calls.arguments))
    text = yield from take_value(source)
    if text and text not in ("null", "None"):
        yield calls.arguments(text)
    return bool(text)


def _take_members(source: Source) -> Reading[_CallMembers | None]:
    """Read up to the arguments of a call whose name is known, or to the end of the object."""
    members = _CallMembers()
    if not (yield from source.accept("{")):
        return None
    while True:
        yield from source.skip_space()
        key = yield from take_string(source)
        if key is None or not (yield from _accept_colon(source)):
            return None
        if key in _ARGUMENTS and members.name is not None:
            return members
        if not (yield from _take_member(source, members, key)):
            return None
        yield from source.skip_space()
        delimiter = yield from source.accept(",", "}")
        if delimiter is None:
            return None
        if delimiter == "}":
            members.closed = True
            return members


def _take_member(source: Source, members: _CallMembers, key: str) -> Reading[bool]:
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


def _accept_colon(source: Source) -> Reading[bool]:
    yield from source.skip_space()
    colon = yield from source.accept(":")
    yield from source.skip_space()
    return colon is not None


def _skip_remaining_members(source: Source) -> Reading[None]:
    """Read the rest of an object after its arguments. Anything that does not continue the object is left unread."""
    while True:
        source.hold()
        yield from source.skip_space()
        delimiter = yield from source.accept(",", "}")
        if delimiter == ",":
            yield from source.skip_space()
            if (
                (yield from take_string(source))
                and (yield from _accept_colon(source))
                and (yield from take_value(source))
            ):
                source.release()
                continue
        if delimiter == "}":
            source.release()
        else:
            source.rewind()
        return
