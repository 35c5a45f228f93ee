"""Rewrites checked JSON schemas to equivalent ones that llguidance follows exactly.

Patterns are the hardest part. In JSON a string's `"` is written `\\"`. llguidance rewrites a pattern so that it matches
the written form, and if a character class holds many control characters it takes all escapes for members: `[^"]` would
let `\\"` through. Without the control characters, which cannot be written here anyway, the rewriting is exact, so they
are removed from every class.
"""

from __future__ import annotations

import re
from typing import Any

from inflight.constraints.schema import FAR, OUTWARD
from inflight.constraints.schema_document import OMIT, has_no_effect, rewritten
from inflight.constraints.schema_logic import expand

# Removes the control characters without their own escape (\b, \t, \n, \f, \r) from a class.
_EXCEPT_CONTROL = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_TINY, _SMALL = 1e-9, 1 << 20  # their sum is exact enough
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]{0,64}\}|[A-Za-z])")  # no property name is longer
# The byte order mark is whitespace in ECMA 262 but not in Rust, so it matches neither \s nor \S.
_SPACE, _NO_SPACE = r"[\s\x{FEFF}]", r"[^\s\x{FEFF}]"
_ESCAPE = re.compile(r"\\.", re.DOTALL)
# Classes as `safe_pattern` returns them, also where a message quotes them with doubled backslashes.
_SAFE_SPACES = re.compile(r"\[(\^?)\\+s\\+x\{FEFF\}\]")
_SAFE_CLASS = re.compile(
    rf"\[(\[\^?\]?(?:\\.|[^\]\\])*\]|{_PROPERTY.pattern}|\\+[sS])"
    + re.escape(_EXCEPT_CONTROL).replace(r"\\", r"\\+")
    + r"\]"
)


def exact_schema(schema: Any, one_of: bool = False) -> Any:
    """Return an equivalent copy with safe patterns and bounds in range, and without keywords that llguidance lacks.

    With `one_of`, alternatives of oneOf that may overlap are made exclusive too, where that is possible.
    """
    return rewritten(expand(schema, one_of), _exact)


def _exact(keyword: str, value: Any) -> Any:
    if has_no_effect(keyword, value):
        return OMIT
    if keyword == "pattern" and isinstance(value, str):
        return safe_pattern(value)
    if keyword == "patternProperties" and isinstance(value, dict):
        return {safe_pattern(name): inner for name, inner in value.items()}
    if keyword in OUTWARD and isinstance(value, int | float) and value * OUTWARD[keyword] > FAR:
        return FAR * OUTWARD[keyword]  # no longer numbers are generated
    if keyword.startswith("exclusiveM") and isinstance(value, int | float) and abs(value) < _SMALL:
        # llguidance takes an exclusive integer for an inclusive one if the bounds are less than 1 apart.
        return value - OUTWARD[keyword] * _TINY if value == int(value) else value
    return value


def safe_pattern(pattern: str) -> str:
    """Return a pattern without control characters in its classes. Invalid patterns stay invalid."""
    parts, position = [], 0
    while position < len(pattern):
        end = position + 1
        if pattern[position] == "[":
            end = end_of_class(pattern, position)
        elif pattern[position] == "\\":
            match = _PROPERTY.match(pattern, position)
            end = match.end() if match else position + 2
        part = _without_mark(pattern[position:end])
        is_class = len(part) > 2
        parts.append(f"[{part}{_EXCEPT_CONTROL}]" if is_class else part)
        position = end
    return "".join(parts)


def _without_mark(part: str) -> str:
    """Return an escape or a class that does not match the byte order mark because of \\S, or of \\s in a negation."""
    escape, replacement = (r"\s", _SPACE) if part.startswith("[^") else (r"\S", _NO_SPACE)
    return _ESCAPE.sub(lambda match: replacement if match[0] == escape else match[0], part)


def as_written(text: str) -> str:
    """Undo `safe_pattern` in a message that quotes patterns."""
    text = _SAFE_SPACES.sub(lambda spaces: r"\S" if spaces[1] else r"\s", text)
    return _SAFE_CLASS.sub(r"\1", text)


def end_of_class(pattern: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`, or start + 1 if none does."""
    depth, position = 0, start
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character == "[":
            depth += 1
            position += pattern.startswith("^", position + 1)
            position += pattern.startswith("]", position + 1)  # a literal in this position
        elif character == "]":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return start + 1
