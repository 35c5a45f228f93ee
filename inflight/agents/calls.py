"""The calls of one message: their numbers, their events, and what is known of the tools they may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from inflight.agents.events import ArgumentsDelta, ContentDelta, ParserEvent, ToolCallBegun, ToolCallEnded
from inflight.agents.source import Markers, Reading, Source
from inflight.agents.values import json_string, resolved, types_of, value_json


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


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What stands before the arguments."""

    name: str
    id: str | None = None


class CallSections:
    """Reads messages with such sections."""

    def __init__(
        self,
        section: tuple[str, str],  # what it begins and ends with
        call: tuple[str, str],
        header: Callable[[Source], Reading[CallHeader | None]],
        fence: str = "",  # that may stand around the arguments too, and so before the end of a call
    ) -> None:
        self._section, self._call = section, call
        self._openings = Markers(section[0], call[0])  # models forget the section now and then
        breaks = product(("\n", ""), repeat=2) if fence else ()  # lines that a fence begins and ends
        fenced = [f"{before}{fence}{after}{call[1]}" for before, after in breaks]
        self._endings = Markers(*fenced, call[1])
        self._header = header

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        while (opening := (yield from source.until(self._openings, ContentDelta, trim=True))) is not None:
            if opening.endswith(self._call[0]):
                source.back(len(self._call[0]))
                opening = opening[: -len(self._call[0])]
            if not (yield from self._read_calls(source, calls)):
                yield ContentDelta(opening + ((yield from source.accept(self._call[0])) or ""))

    def _read_calls(self, source: Source, calls: Calls) -> Reading[bool]:
        if not (yield from self._read_call(source, calls)):
            return False
        while (yield from self._read_call(source, calls)):
            pass
        yield from source.accept_after_space(self._section[1])
        yield from source.skip_last_space()
        return True

    def _read_call(self, source: Source, calls: Calls) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        opened = yield from source.accept(self._call[0])
        header = (yield from self._header(source)) if opened else None
        if header is None or not header.name:
            source.rewind()
            return False
        source.release()
        yield calls.begin(header.name, header.id)
        ending = yield from source.until(self._endings, calls.arguments)
        yield from calls.end(ending is not None)
        return True
