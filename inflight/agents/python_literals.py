"""Python's way of writing values, as JSON. Some models write it where JSON was meant."""

from __future__ import annotations

import json
import re
from typing import Any

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
