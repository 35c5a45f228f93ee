"""Arguments that are written as bare text between tags: their JSON depends on what the tool's schema says."""

from __future__ import annotations

from inflight.agents.calls import Calls
from inflight.agents.python_literals import NOT_JSON, json_string, literal_json, parsed_json
from inflight.agents.schema_types import type_name, types_of
from inflight.agents.source import Markers, Reading, Source


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
    name = type_name(value)
    return not types or name in types or (name == "integer" and "number" in types)
