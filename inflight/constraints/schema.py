"""Checks JSON schemas: every keyword must be supported, and a finite value must exist.

By the standard unknown keywords are annotations, and llguidance ignores them. But a user who writes `nullable` or
`requried` expects an effect, so a keyword that has none here and is no known annotation is rejected by name.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from inflight.constraints.schema_document import (
    DATA_KEYWORDS,
    NAMED_SCHEMAS,
    SCHEMA_KEYWORDS,
    SCHEMA_LISTS,
    UnsupportedKeywordError,
    has_no_effect,
    is_annotation,
    part_at,
)
from inflight.constraints.schema_logic import REPLACED, expand
from inflight.errors import ParameterError, clipped
from inflight.structured_outputs import PARAM

MAX_OPTIONAL = 500  # properties of one object: any of them may be next, and the grammar must consider all

_ASSERTIONS = {
    *("$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf"),
    *("pattern", "required", "type"),
}
_KEYWORDS = SCHEMA_KEYWORDS | SCHEMA_LISTS | NAMED_SCHEMAS | REPLACED | _ASSERTIONS
_NEEDED = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
# Control characters that need an escape of the form \u0001 in JSON, which `grammars.py` does not allow.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# llguidance computes bounds in floats and 64-bit integers: values near the limits are inexact or crash the process.
_LARGEST_EXACT, FAR = 1 << 53, 1 << 62
OUTWARD = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
# Patterns whose character classes have no intersections and the like, which not all regex dialects have.
_CLASS = r"\[\^?\]?(?:\\.|&(?!&)|-(?!-)|~(?!~)|[^\\\]\[&~-])*+\]"
_PLAIN_PATTERN = re.compile(rf"(?:\\.|[^\\\[]|{_CLASS})*+", re.DOTALL)


def read_schema(text: str) -> Any:
    """Parse and check a schema. Raises ParameterError."""
    name = f"{PARAM}.json"
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{name} is not JSON: {error}", param=PARAM) from None
    check_schema(schema, name)
    return schema


def check_schema(schema: Any, name: str, param: str = PARAM) -> None:
    """Raise ParameterError if a schema cannot be used. `name` is what the message calls it, `param` the parameter."""
    if not isinstance(schema, bool | dict):
        raise ParameterError(
            f"{name} is of type {type(schema).__name__}: a JSON schema is an object, true or false",
            param=param,
        )
    try:
        if any(map(_CONTROL.search, _texts(schema))):
            raise invalid(f"{name} has a control character other than \\b, \\f, \\n, \\r and \\t", param)
        for keyword, pointer, owner in _keywords(schema, "#"):
            _check_keyword(keyword, owner, name, param, pointer)
        expanded = expand(schema)
        has_references = any(keyword == "$ref" for keyword, _, _ in _keywords(expanded, "#"))
        endless = _endless_part(expanded) if has_references else None
    except UnsupportedKeywordError as error:
        raise _unsupported(name, param, error.keyword, error.pointer, error.reason) from None
    except RecursionError:
        raise ParameterError(f"{name} is nested too deeply", param=param) from None
    if endless is not None:
        raise invalid(f"{name}: {endless} refers back to itself, so that no finite value can match it", param)


def _check_keyword(keyword: str, owner: dict[str, Any], name: str, param: str, pointer: str) -> None:
    value = owner[keyword]
    if has_no_effect(keyword, value):
        return
    if keyword not in _KEYWORDS and not is_annotation(keyword):
        raise _unsupported(name, param, keyword, pointer)
    if keyword in _NEEDED and _NEEDED[keyword] not in owner:
        raise _unsupported(name, param, keyword, pointer, f" without {_NEEDED[keyword]!r}")
    if keyword == "properties":
        _check_optional(owner, name, param, pointer)
    if keyword == "multipleOf" and not _is_positive(value):
        raise invalid(f"{name}: multipleOf, at {pointer}, must be a number above 0", param)
    if keyword == "minProperties" and _may_repeat_names(owner):
        reason = ": it requires more than one property beyond the required ones"
        raise _unsupported(name, param, keyword, pointer, reason)
    if _is_inexact(keyword, value):
        raise invalid(f"{name}: {keyword}, at {pointer}, must be a number of at most 2^53", param)
    if not all(map(_PLAIN_PATTERN.fullmatch, _patterns(keyword, value))):
        raise invalid(
            f"{name}: {keyword}, at {pointer}, has a character class that is not closed or contains [, &&, -- or ~~: "
            "escape these with \\",
            param,
        )


def invalid(message: str, param: str = PARAM) -> ParameterError:
    """Return the error for a constraint that cannot be used."""
    return ParameterError(message, param=param, code="invalid_constraint")


def _unsupported(name: str, param: str, keyword: str, pointer: str, reason: str = "") -> ParameterError:
    return ParameterError(
        f"{name}: the keyword {keyword!r}, at {pointer}, is not supported{reason}",
        param=param,
        code="unsupported_keyword",
    )


def _check_optional(schema: dict[str, Any], name: str, param: str, pointer: str) -> None:
    properties, required = schema["properties"], schema.get("required")
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL:
        return
    texts = (item for item in required if isinstance(item, str)) if isinstance(required, list) else ()
    num_optional = len(properties.keys() - set(texts))
    if num_optional > MAX_OPTIONAL:
        raise ParameterError(
            f"{name}: properties, at {pointer}, has {num_optional} that are not required: at most {MAX_OPTIONAL} are "
            "allowed",
            param=param,
            code="constraint_too_complex",
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_inexact(keyword: str, value: Any) -> bool:
    if keyword in ("const", "enum"):
        return any(abs(number) > _LARGEST_EXACT for number in _integers(value))
    if keyword not in OUTWARD or not isinstance(value, int | float):
        return False
    is_far = value * OUTWARD[keyword] > FAR  # replaced by FAR when the schema is rewritten
    return isinstance(value, bool) or (abs(value) > _LARGEST_EXACT and not is_far)


def _patterns(keyword: str, value: Any) -> list[str]:
    if keyword == "patternProperties" and isinstance(value, dict):
        return list(value)
    return [value] if keyword == "pattern" and isinstance(value, str) else []


def _may_repeat_names(schema: dict[str, Any]) -> bool:
    """Whether an object could reach `minProperties` by repeating a name, which a grammar does not notice."""
    least, required = schema["minProperties"], schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    return isinstance(least, int | float) and least > num_required + 1


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in JSON data, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)


# ---- traversal ----


def _keywords(schema: Any, pointer: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield every keyword of a schema and its subschemas, with the pointer to its schema and that schema."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword, pointer, schema
        inner_pointer = f"{pointer}/{keyword}"
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            for name, inner in value.items():
                yield from _keywords(inner, f"{inner_pointer}/{clipped(name, 100)}")
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _keywords(inner, f"{inner_pointer}/{index}")
        elif keyword in SCHEMA_KEYWORDS:
            yield from _keywords(value, inner_pointer)


# ---- endless schemas ----

MAX_PASSES = 32  # over a schema; what is undecided then is left to llguidance


def _endless_part(schema: Any) -> str | None:
    """Return a pointer to a part that no finite value can match, or None if no such part is known.

    A part is finite if everything that its values must contain is finite. All are endless until proven finite.
    """
    parts = _parts(schema)
    targets = {id(part.schema): _target(schema, part.schema.get("$ref")) for part in parts.values()}
    finite: set[int] = set()

    def is_part_finite(inner: Any) -> bool:
        return id(inner) in finite or id(inner) not in parts

    identities = list(parts)
    for _ in range(MAX_PASSES):
        num_finite = len(finite)
        identities.reverse()  # references lead both ways
        finite.update(
            identity
            for identity in identities
            if is_part_finite(targets[identity]) and _is_finite(parts[identity].schema, is_part_finite)
        )
        if len(finite) == num_finite:
            endless = next((part for identity, part in parts.items() if identity not in finite), None)
            return None if endless is None else endless.pointer()
    return None


def _is_finite(schema: dict[str, Any], is_part_finite: Callable[[Any], bool]) -> bool:
    """Return whether a part is finite, apart from what it refers to. `is_part_finite` answers for the parts in it."""
    if not all(map(is_part_finite, _items(schema.get("allOf")))):
        return False
    for keyword in ("anyOf", "oneOf"):
        branches = _items(schema.get(keyword))
        if branches and not any(map(is_part_finite, branches)):
            return False
    return all(map(is_part_finite, _required_parts(schema)))


def _required_parts(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas of values that must be present. Values of another type need not have any."""
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, dict):
        yield from (properties.get(name) for name in _items(schema.get("required")) if isinstance(name, str))
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int):
        first = _items(schema.get("prefixItems"))
        yield from first[:least]
        if least > len(first):
            yield schema.get("items")


@dataclass(frozen=True, slots=True)
class _Subschema:
    """An object in a schema, and how to reach it from the one that contains it."""

    schema: dict[str, Any]
    owner: _Subschema | None
    path: str

    def pointer(self) -> str:
        return "#" if self.owner is None else f"{self.owner.pointer()}/{self.path}"


def _parts(schema: Any) -> dict[int, _Subschema]:
    """Return all objects in a schema except constants by their identity, outer ones first."""
    parts: dict[int, _Subschema] = {}
    # Values that are still to be visited, the next one last: each with its owner and path, and whether its keys are
    # names rather than keywords.
    waiting: list[tuple[Any, _Subschema | None, str, bool]] = [(schema, None, "", False)]
    while waiting:
        value, owner, path, has_names = waiting.pop()
        if isinstance(value, list):
            waiting += [(value[i], owner, f"{path}/{i}", False) for i in reversed(range(len(value)))]
        elif isinstance(value, dict) and id(value) not in parts:
            part = parts[id(value)] = _Subschema(value, owner, path)
            waiting += [
                (inner, part, _escaped(name), name in NAMED_SCHEMAS)
                for name, inner in reversed(value.items())
                if name not in DATA_KEYWORDS or has_names
            ]
    return parts


def _target(root: Any, reference: Any) -> Any:
    """Return what a JSON pointer refers to, or None."""
    if isinstance(reference, str) and reference.startswith("#"):
        with contextlib.suppress(LookupError):
            return part_at(root, reference)
    return None


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
