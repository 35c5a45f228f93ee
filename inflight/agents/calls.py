"""The tool calls of one message, and the ways of reading them that several formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from inflight.agents.events import ArgumentsDelta, ContentDelta, ParserEvent, ToolCallBegun, ToolCallEnded
from inflight.agents.source import Markers, Reading, Source
from inflight.agents.values import bare_text_to_json, json_string, resolve_reference, schema_types


class CallEmitter:
    """Numbers the calls of a message and makes their events: `begin`, any number of `arguments`, `end`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Create an emitter for the tools of a request: `{"type": "function", "function": {"name": ..., ...}}`."""
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters")
        self._index = -1
        self._empty = True  # the current call has no arguments yet

    def may_call(self, name: str) -> bool:
        """Return whether the tool exists. Formats without markers check this: their calls could be ordinary text."""
        return not self._parameters or name in self._parameters

    def schema(self, function: str, parameter: str) -> Any:
        """Return the JSON schema of a parameter, or None if it has none."""
        schema = self._parameters.get(function)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return None
        return resolve_reference(properties.get(parameter), schema)

    def begin(self, name: str, id: str | None = None) -> ParserEvent:
        self._index += 1
        self._empty = True
        return ToolCallBegun(self._index, name, id)

    def arguments(self, text: str) -> ParserEvent:
        self._empty = self._empty and text.isspace()
        return ArgumentsDelta(self._index, text)

    def end(self, complete: bool = True) -> Iterator[ParserEvent]:
        """End the call. A complete call without arguments gets an empty object."""
        if complete and self._empty:
            yield ArgumentsDelta(self._index, "{}")
        yield ToolCallEnded(self._index, complete)


class TypedArguments:
    """The arguments of one call, written as bare text between tags and converted by their schemas."""

    def __init__(self, calls: CallEmitter, function: str) -> None:
        self._calls, self._function = calls, function
        self._before = "{"

    def read(self, source: Source, parameter: str, endings: Markers) -> Reading[str | None]:
        """Read a value up to one of the endings, and return that ending. A string is emitted as it arrives."""
        types = schema_types(self._calls.schema(self._function, parameter))
        key = f"{self._before}{json_string(parameter)}: "
        self._before = ", "
        if types == {"string"}:
            yield self._calls.arguments(key + '"')
            ending = yield from source.emit_until(
                endings, lambda text: self._calls.arguments(json_string(text)[1:-1])
            )
            if ending is not None:
                yield self._calls.arguments('"')
            return ending
        text, ending = yield from source.take_until(endings)
        yield self._calls.arguments(key + (text if ending is None else bare_text_to_json(text, types)))
        return ending

    def end(self) -> Reading[None]:
        yield self._calls.arguments("{}" if self._before == "{" else "}")
        yield from self._calls.end()


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The part of a call before its arguments."""

    name: str
    id: str | None = None


class CallSections:
    """Reads messages whose calls are in sections between markers, each call being a header and its arguments."""

    def __init__(
        self,
        section: tuple[str, str],  # start and end markers
        call: tuple[str, str],
        read_header: Callable[[Source], Reading[CallHeader | None]],
        fence: str = "",  # may surround the arguments, and so precede the end of a call
    ) -> None:
        self._section, self._call = section, call
        self._openings = Markers(section[0], call[0])  # models sometimes omit the section
        line_breaks = product(("\n", ""), repeat=2) if fence else ()
        fenced = [f"{before}{fence}{after}{call[1]}" for before, after in line_breaks]
        self._endings = Markers(*fenced, call[1])
        self._read_header = read_header

    def read(self, source: Source, calls: CallEmitter) -> Reading[None]:
        while (
            opening := (yield from source.emit_until(self._openings, ContentDelta, trim=True))
        ) is not None:
            if opening.endswith(self._call[0]):
                source.unread(len(self._call[0]))
                opening = opening[: -len(self._call[0])]
            if not (yield from self._read_calls(source, calls)):
                yield ContentDelta(opening + ((yield from source.accept(self._call[0])) or ""))

    def _read_calls(self, source: Source, calls: CallEmitter) -> Reading[bool]:
        if not (yield from self._read_call(source, calls)):
            return False
        while (yield from self._read_call(source, calls)):
            pass
        yield from source.accept_after_space(self._section[1])
        yield from source.skip_trailing_space()
        return True

    def _read_call(self, source: Source, calls: CallEmitter) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        opened = yield from source.accept(self._call[0])
        header = (yield from self._read_header(source)) if opened else None
        if header is None or not header.name:
            source.rewind()
            return False
        source.release()
        yield calls.begin(header.name, header.id)
        ending = yield from source.emit_until(self._endings, calls.arguments)
        yield from calls.end(ending is not None)
        return True
