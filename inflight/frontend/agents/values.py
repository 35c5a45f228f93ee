"""Argument values: JSON as it arrives, the types that a schema allows, and text that is converted to JSON.

Some models write Python literals where JSON was meant, and some write bare text between tags, whose JSON depends on the
schema of the parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from inflight.constraints.schema_document import part_at
from inflight.frontend.agents.source import ParserEvent, Reading, Source

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
# Names of types in schemas that were written by hand or derived from a programming language.
_TYPE_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "num"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("list", "arr", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "struct", "json"), "object"),
    **dict.fromkeys(("none", "nil"), "null"),
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

# The characters that matter outside strings. Valid JSON has no `<` or underscore there, but the markers of formats do.
_OUTSIDE = re.compile(r'["{}\[\]<]')
_OUTSIDE_STRICT = re.compile(r'["{}\[\]<_]')
_SCALAR_END = re.compile(r"[\s,}\]<]")
_IN_STRING = re.compile(r'["\\]')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = "0123456789abcdefABCDEF"


def json_type(value: object) -> str:
    """Return the JSON schema type of a parsed JSON value."""
    return _JSON_TYPES.get(type(value), "object")


def resolve_reference(schema: object, root: object) -> object:
    """Follow the schema's `$ref` into `root`. A schema without a local reference is returned as it is."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        try:
            schema = part_at(root, reference)
        except LookupError:
            return None
    return schema


def schema_types(schema: object, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """Return the types that a schema allows; an empty set means that they are unknown."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    types = schema.get("type")
    if isinstance(types, str | list):
        names = [types] if isinstance(types, str) else types
        return frozenset(_TYPE_NAMES.get(name.lower(), name) for name in names if isinstance(name, str))
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
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
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
        position = 0
        if text and not self._begun:
            self._begun = True
            self._scalar = text[0] not in '"{['
        while position < len(text) and not self.done:
            if self._escaped:
                self._escaped, position = False, position + 1
            elif self._in_string:
                position = self._scan_string(text, position)
            elif self._scalar:
                end = _SCALAR_END.search(text, position)
                self.done = self.whole = end is not None
                position = len(text) if end is None else end.start()
            else:
                position = self._scan_structure(text, position)
        return position

    def _scan_string(self, text: str, position: int) -> int:
        match = _IN_STRING.search(text, position)
        if match is None:
            return len(text)
        self._escaped = match.group() == "\\"
        if not self._escaped:
            self._in_string = False
            self.done = self.whole = self._depth == 0
        return match.end()

    def _scan_structure(self, text: str, position: int) -> int:
        match = self._outside.search(text, position)
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
            unescaped = _PLAIN.match(source.available())
            assert unescaped is not None
            text = source.take(unescaped.end())
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
