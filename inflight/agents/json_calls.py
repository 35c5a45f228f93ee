"""Calls that are JSON objects: `{"name": ..., "arguments": {...}}`, in any order of their members."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.agents.calls import Calls
from inflight.agents.json_text import read_string, read_value, take_string, take_value
from inflight.agents.source import Reading, Source

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
