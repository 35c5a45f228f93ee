"""Argument values: which JSON types a schema allows, and how text that is not JSON becomes JSON.

Some models write Python literals where JSON was meant, and some write bare text between tags, whose JSON depends on the
schema of the parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

NOT_JSON = object()  # returned by `parse_json`
_MAX_DEPTH = 8  # of nested alternatives in a schema, and of references to references
_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    type(None): "null",
}
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


def json_type(value: object) -> str:
    """Return the JSON schema type of a parsed JSON value."""
    return _JSON_TYPES.get(type(value), "object")


def resolve_reference(schema: object, root: object) -> object:
    """Follow the schema's `$ref` into `root`. A schema without a local reference is returned as it is."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in reference[2:].split("/"):
            key = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def schema_types(schema: object, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """Return the types that a schema allows; an empty set means that they are unknown."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    if isinstance(types, list):
        return frozenset(name for name in types if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives = [schema_types(choice, depth - 1) for choice in schema[key]]
            return frozenset().union(*alternatives) if all(alternatives) else frozenset()
    values: Any = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(map(json_type, values))
    return frozenset()


def python_to_json(text: str) -> str | None:
    """Convert a Python literal to JSON text; return None if it is not a literal that JSON can express.

    Literals are strings, numbers, booleans, None, and lists, tuples and dicts of these.
    """
    parts = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        match token.lastgroup:
            case "string":
                parts.append(json_string(_ESCAPE.sub(_unescape, token.group()[1:-1])))
            case "word":
                parts.append(_WORDS.get(token.group(), "?"))
            case "opening":
                parts.append("[")
            case "closing":
                parts.append("]")
            case _:
                parts.append(token.group())
    converted = "".join(parts).strip()
    return None if parse_json(converted) is NOT_JSON else converted


def bare_text_to_json(text: str, types: frozenset[str]) -> str:
    """Convert unquoted text to the JSON of one of the types, or to a JSON string if it is none of them.

    An empty set of types allows any type.
    """
    stripped = text.strip()
    for candidate in (stripped, python_to_json(stripped), stripped.lower()):
        value = NOT_JSON if candidate is None else parse_json(candidate)
        if candidate is not None and value is not NOT_JSON and _has_type(value, types):
            return candidate
    return json_string(text)


def json_string(text: str) -> str:
    """Return the text as a JSON string. Lone surrogates, which UTF-8 cannot encode, stay escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    try:
        quoted.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return quoted


def parse_json(text: str) -> Any:
    """Return the value of valid JSON text, otherwise NOT_JSON."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return NOT_JSON


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _has_type(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, str):
        return False  # quotes in bare text belong to the text
    name = json_type(value)
    return not types or name in types or (name == "integer" and "number" in types)


def _unescape(escape: re.Match[str]) -> str:
    short, middle, long, newline, letter = escape.groups()
    digits = short or middle or long
    if digits:
        code = int(digits, 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    if newline:
        return ""
    return _LETTERS.get(letter) or (letter if letter in "'\"\\" else f"\\{letter}")
