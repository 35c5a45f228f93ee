"""Which types a parameter may have, by its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8  # of alternatives within alternatives of a schema, and of references to references
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null"}


def type_name(value: object) -> str:
    """Of JSON data."""
    return _NAMES.get(type(value), "object")


def resolved(schema: object, root: object) -> object:
    """The schema that a reference to a part of the root leads to; any other is itself."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in reference[2:].split("/"):
            schema = (
                schema.get(name.replace("~1", "/").replace("~0", "~"))
                if isinstance(schema, Mapping)
                else None
            )
    return schema


def types_of(schema: object, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """The types that a schema allows; none where it does not say, or not in a way that is understood here."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [types_of(choice, depth - 1) for choice in schema[key]]
            return frozenset().union(*found) if all(found) else frozenset()
    values: Any = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(map(type_name, values))
    return frozenset()


_TOKEN = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<opening>\()|(?P<closing>,?\s*\))"
    r"|(?P<other>[\s\[\]{},:]+|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n)|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


def literal_json(text: str) -> str | None:
    """The JSON text of a literal: strings, numbers, truth values, None, and lists, tuples and dicts of these."""
    parts = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        match token.lastgroup:
            case "string":
                parts.append(json_string(_ESCAPE.sub(_unescaped, token.group()[1:-1])))
            case "word":
                parts.append(_WORDS.get(token.group(), "?"))
            case "opening":
                parts.append("[")
            case "closing":
                parts.append("]")
            case _:
                parts.append(token.group())
    found = "".join(parts).strip()
    return None if parsed_json(found) is NOT_JSON else found


def json_string(text: str) -> str:
    """The text as a JSON string. Half a surrogate pair, which no UTF-8 has, stays an escape."""
    said = json.dumps(text, ensure_ascii=False)
    try:
        said.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return said


NOT_JSON = object()


def parsed_json(text: str) -> Any:
    """What valid JSON says, else NOT_JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NOT_JSON


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unescaped(found: re.Match[str]) -> str:
    short, middle, long, newline, letter = found.groups()
    digits = short or middle or long
    if digits:
        code = int(digits, 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    if newline:
        return ""
    return _LETTERS.get(letter) or (letter if letter in "'\"\\" else f"\\{letter}")


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a bare value, of one of these types; no types are any. What is none of them is a string."""
    stripped = text.strip()
    for candidate in (stripped, literal_json(stripped), stripped.lower()):
        value = NOT_JSON if candidate is None else parsed_json(candidate)
        if candidate is not None and value is not NOT_JSON and _is_one_of(value, types):
            return candidate
    return json_string(text)


def _is_one_of(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, str):
        return False  # bare text has no quotes of its own
    name = type_name(value)
    return not types or name in types or (name == "integer" and "number" in types)
