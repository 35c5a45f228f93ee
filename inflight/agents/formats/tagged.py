"""Calls whose arguments are bare text between tags, converted to JSON by the schemas of the parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.agents.formats.base import CallEmitter, ToolFormat
from inflight.agents.grammar_writer import (
    CallGrammar,
    GrammarWriter,
    Parameter,
    Tool,
    bare_value,
    parameter_sequence,
    tool_parameters,
)
from inflight.agents.reading import Markers, Reading, Source
from inflight.agents.values import bare_text_to_json, json_string, schema_types

_NAME = re.compile(r"[^<>\n]*")
_UNTAGGED_NAME = re.compile(r"[\w.\-]*")


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The tags of a format. White space between them has no meaning."""

    outer: tuple[str, str]  # around a call
    name: tuple[str, str]  # around the name of the function; ("", "") if it stands alone
    key: tuple[str, str]  # around the name of a parameter
    value: tuple[str, str]  # around its value
    end: str  # of a call, within the outer tags; "" if there is none
    lines: bool = False  # line breaks around a value are not part of it
    markers: tuple[str, ...] = ()  # that may be special tokens

    def format(self) -> ToolFormat:
        # Models sometimes omit the outer tags.
        inner = (self.name[0],) if self.name[0] else ()
        grammar = CallGrammar(self.outer[0], self.write, forbidden=inner, name_pattern=self._name_pattern)
        return ToolFormat(self.markers, Markers(self.outer[0], *inner), self.read, grammar)

    @property
    def _name_pattern(self) -> re.Pattern[str]:
        return _NAME if self.name[1] else _UNTAGGED_NAME

    @property
    def _last(self) -> str:
        """The tag that ends a call."""
        return self.end or self.outer[1]

    @property
    def _value_ends(self) -> tuple[str, ...]:
        """The ends of a value. Between lines, a value without an end tag ends at the next tag."""
        end = self.value[1]
        return (f"\n{end}", end, f"\n{self.key[0]}", f"\n{self.end}") if self.lines else (end,)

    def read(self, source: Source, calls: CallEmitter, opening: str) -> Reading[bool]:
        name = yield from self._read_name(source, opening)
        if not name:
            return False
        yield calls.begin(name)
        arguments = _TypedArguments(calls, name)
        endings = Markers(*self._value_ends)
        while (yield from self._read_parameter(source, arguments, endings)):
            pass
        if (yield from source.accept_after_space(self._last)):
            yield from arguments.end()
        else:
            yield from calls.end(complete=False)
        if self.end:
            yield from source.accept_after_space(self.outer[1])
        yield from source.skip_trailing_space()
        return True

    def _read_name(self, source: Source, opening: str) -> Reading[str]:
        source.hold()
        opened = opening == self.name[0]
        if not opened:
            yield from source.skip_space()
            opened = not self.name[0] or (yield from source.accept(self.name[0])) is not None
        name = (yield from source.take_while(self._name_pattern)) if opened else ""
        if self.name[1]:
            closed = yield from source.accept(self.name[1])
        else:  # a name alone could be ordinary text
            yield from source.skip_space()
            closed = yield from source.accept(self.key[0], self._last)
            source.unread(len(closed or ""))
        if name.strip() and closed:
            source.release()
            return name.strip()
        source.rewind()
        return ""

    def _read_parameter(self, source: Source, arguments: _TypedArguments, endings: Markers) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        if (yield from source.accept(self.key[0])) is None:
            source.rewind()
            return False
        key = (yield from source.take_while(_NAME)).strip()
        closed = yield from source.accept(self.key[1])
        if self.value[0]:
            yield from source.skip_space()
            closed = closed and (yield from source.accept(self.value[0]))
        if not key or not closed:
            source.rewind()
            return False
        source.release()
        if self.lines:
            yield from source.accept("\n")
        ending = yield from arguments.read(source, key, endings)
        if ending is not None and not ending.endswith(self.value[1]):
            source.unread(len(ending))
        return ending is not None

    def write(self, writer: GrammarWriter, tools: Sequence[Tool], _: bool) -> str:
        line = "\n" if self.lines else ""

        def write_parameter(parameter: Parameter) -> str:
            ending, never = f"{line}{self.value[1]}", self._value_ends[2:]
            begin = writer.terminals(self.key[0], parameter.name, self.key[1], self.value[0], line)
            return f"{begin} {bare_value(writer, parameter, ending, never)} GAP"

        alternatives = (
            f"{writer.terminals(tool.name, self.name[1])} GAP {parameter_sequence(parameters, write_parameter)}"
            for tool, parameters in zip(tools, tool_parameters(tools, _NAME), strict=True)
        )
        name, end = writer.terminals(self.name[0]), writer.terminals(self._last)
        call = f"GAP {name} ({' | '.join(alternatives)}) {end}"
        return f"{call} GAP {writer.terminals(self.outer[1])}" if self.end else call


class _TypedArguments:
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


_TOOL_CALL = ("<tool_call>", "</tool_call>")
QWEN3_CODER = TaggedCalls(
    outer=_TOOL_CALL,
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    lines=True,
    markers=_TOOL_CALL,
).format()
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
GLM45 = TaggedCalls(
    outer=_TOOL_CALL,
    name=("", ""),
    key=_KEY,
    value=_VALUE,
    end="",
    markers=(*_TOOL_CALL, *_KEY, *_VALUE),
).format()
