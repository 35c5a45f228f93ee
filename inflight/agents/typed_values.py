"""Arguments that are written as bare text between tags: their JSON depends on what the tool's schema says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.agents.calls import Calls
from inflight.agents.python_literals import NOT_JSON, json_string, literal_json, parsed_json
from inflight.agents.source import Markers, Reading, Source

_MAX_DEPTH = 8  # of alternatives within alternatives of a schema
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class TypedArguments:
    """Writes the arguments of one call, parameter by parameter."""

    def __init__(self, calls: Calls, function: str) -> None:
        self._calls, self._function = calls, function
        self._before = "{"

    def read(self, source: Source, parameter: str, endings: Markers) -> Reading[str | None]:
        """The value of a parameter up to one of the endings, which is returned. A string is told as it comes."""
        types = types_of(self._calls.schema(self._function, parameter))
        begin = f"{self._before}{json_string(parameter)}: "
        self._before = ", "
        if types == {"string"}:
            yield self._calls.arguments(begin + '"')
            ending = yield from source.until(
                endings, lambda text: self._calls.arguments(json_string(text)[1:-1])
            )
            if ending is not None:
                yield self._calls.arguments('"')
            return ending
        text, ending = yield from source.text_until(endings)
        yield self._calls.arguments(begin + (text if ending is None else value_json(text, types)))
        return ending

    def end(self) -> Reading[None]:
        yield self._calls.arguments("{}" if self._before == "{" else "}")
        yield from self._calls.end()


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
    name = "null" if value is None else _NAMES[type(value)]
    return not types or name in types or (name == "integer" and "number" in types)


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
        return frozenset("null" if value is None else _NAMES.get(type(value), "object") for value in values)
    return frozenset()
