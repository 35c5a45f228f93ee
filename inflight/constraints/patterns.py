"""Patterns of JSON schemas, made safe to quote.

In JSON a string's `"` is written `\\"`. llguidance rewrites a pattern so that it matches what is written, and where a
class of characters holds many control characters it takes all escapes for members: `[^"]` would let `\\"` through.
Without the control characters that cannot be spelled here anyway the rewriting is exact, so they are taken out of every
class.
"""

from __future__ import annotations

import re
from typing import Any

from inflight.constraints.schema import FAR, OMIT, OUTWARD, changes_nothing, rewritten

# Those without an escape of their own (\b, \t, \n, \f, \r).
_OUT = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_TINY, _SMALL = 1e-9, 1 << 20  # whose sum is exact enough
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]{0,64}\}|[A-Za-z])")  # no name is longer
# What `safe_pattern` makes of a class, also where a message has quoted it.
_MADE_SAFE = re.compile(
    rf"\[(\[\^?\]?(?:\\.|[^\]\\])*\]|{_PROPERTY.pattern})" + re.escape(_OUT).replace(r"\\", r"\\+") + r"\]"
)


def safe_pattern(pattern: str) -> str:
    """The same but for control characters. What is no expression stays none."""
    parts, at = [], 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "[":
            end = _end_of_class(pattern, at)
        elif pattern[at] == "\\":
            found = _PROPERTY.match(pattern, at)
            end = found.end() if found else at + 2
        is_class = end > at + 2
        parts.append(f"[{pattern[at:end]}{_OUT}]" if is_class else pattern[at:end])
        at = end
    return "".join(parts)


def as_written(text: str) -> str:
    """A text in which patterns are again what they were before they were made safe."""
    return _MADE_SAFE.sub(r"\1", text)


def _end_of_class(pattern: str, start: int) -> int:
    """Behind the bracket that closes the one at `start`; classes may hold others. If there is none: start + 1."""
    depth, at = 0, start
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # which stands for itself there
        elif character == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return start + 1


def with_safe_patterns(schema: Any) -> Any:
    """A copy of a schema, wherever its patterns are. Bounds that are far away are nearer, and what changes nothing is
    left out."""
    return rewritten(schema, _safe)


def _safe(keyword: str, value: Any) -> Any:
    if changes_nothing(keyword, value):
        return OMIT
    if keyword == "pattern" and isinstance(value, str):
        return safe_pattern(value)
    if keyword == "patternProperties" and isinstance(value, dict):
        return {safe_pattern(name): inner for name, inner in value.items()}
    if keyword in OUTWARD and isinstance(value, int | float) and value * OUTWARD[keyword] > FAR:
        return FAR * OUTWARD[keyword]  # as far as numbers are written at all
    if keyword.startswith("exclusiveM") and isinstance(value, int | float) and abs(value) < _SMALL:
        # Between bounds that are less than 1 apart, llguidance takes an exclusive integer for an inclusive one.
        return value - OUTWARD[keyword] * _TINY if value == int(value) else value
    return value
