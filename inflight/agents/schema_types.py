"""Which types a parameter may have, by its schema."""

from __future__ import annotations

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
