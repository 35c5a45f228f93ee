"""The calls of one message: their numbers, their events, and what is known of the tools they may call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.agents.events import ArgumentsDelta, ParserEvent, ToolCallBegun, ToolCallEnded
from inflight.agents.schema_types import resolved


class Calls:
    """One call at a time: `begin`, any number of `arguments`, `end`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tools as requests have them: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters")
        self._index = -1
        self._empty = True

    def may_call(self, name: str) -> bool:
        """Whether there is such a tool. Formats without markers ask: their calls could be ordinary text."""
        return not self._parameters or name in self._parameters

    def schema(self, function: str, parameter: str) -> Any:
        """The JSON schema of a parameter, None where there is none."""
        schema = self._parameters.get(function)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return resolved(properties.get(parameter), schema) if isinstance(properties, Mapping) else None

    def begin(self, name: str, id: str | None = None) -> ParserEvent:
        self._index += 1
        self._empty = True
        return ToolCallBegun(self._index, name, id)

    def arguments(self, text: str) -> ParserEvent:
        self._empty = self._empty and text.isspace()
        return ArgumentsDelta(self._index, text)

    def end(self, complete: bool = True) -> Iterator[ParserEvent]:
        """A call that is complete has arguments, if only an empty object; one that broke off has what came."""
        if complete and self._empty:
            yield ArgumentsDelta(self._index, "{}")
        yield ToolCallEnded(self._index, complete)
