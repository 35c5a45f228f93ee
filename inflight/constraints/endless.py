"""Schemas that lead back to themselves for ever: no value of theirs would ever be complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_CONSTANTS = {"const", "enum", "default", "example", "examples"}
_NAMED = ("/properties", "/patternProperties", "/$defs", "/definitions")  # in these, keys are names
MAX_PASSES = 32  # over a schema; what is not decided then is left to others


def endless_place(schema: Any) -> str | None:
    """A place in a schema for which there is no finite value; None if there is none, as far as can be told.

    A part is finite if what it must hold is; all are taken for endless until that is known.
    """
    parts = dict(_parts(schema, "#"))
    finite: set[str] = set()
    places = list(parts)
    for _ in range(MAX_PASSES):
        num_finite = len(finite)
        places.reverse()  # references lead both ways
        finite.update(place for place in places if _is_finite(parts[place], place, parts, finite))
        if len(finite) == num_finite:
            return next((place for place in parts if place not in finite), None)
    return None


def _is_finite(part: dict[str, Any], place: str, parts: dict[str, dict[str, Any]], finite: set[str]) -> bool:
    def holds(at: str) -> bool:
        return at not in parts or at in finite

    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not holds(unquote(reference)):
        return False
    if not all(holds(f"{place}/allOf/{index}") for index in range(_length(part.get("allOf")))):
        return False
    for keyword in ("anyOf", "oneOf"):
        num_ways = _length(part.get(keyword))
        if num_ways and not any(holds(f"{place}/{keyword}/{index}") for index in range(num_ways)):
            return False
    return all(map(holds, _needed(part, place)))


def _needed(part: dict[str, Any], place: str) -> Iterator[str]:
    """The places of what a value must have in it. If it may be of another type, it need not have anything."""
    if part.get("type") == "object" and isinstance(part.get("required"), list):
        for name in part["required"]:
            yield f"{place}/properties/{_escaped(str(name))}"
    least = part.get("minItems")
    if part.get("type") == "array" and isinstance(least, int):
        num_first = _length(part.get("prefixItems"))
        yield from (f"{place}/prefixItems/{index}" for index in range(min(least, num_first)))
        if least > num_first:
            yield f"{place}/items"


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects in a schema but for constants, by the pointer that a reference to them has."""
    if isinstance(schema, dict):
        yield place, schema
        for name, inner in schema.items():
            if name not in _CONSTANTS or place.endswith(_NAMED):
                yield from _parts(inner, f"{place}/{_escaped(name)}")
    elif isinstance(schema, list):
        for index, inner in enumerate(schema):
            yield from _parts(inner, f"{place}/{index}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0
