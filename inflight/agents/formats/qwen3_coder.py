"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import CallEmitter, TypedArguments
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import (
    CallGrammar,
    GrammarWriter,
    Parameter,
    Tool,
    bare_value,
    parameter_sequence,
    tool_parameters,
)
from inflight.agents.source import Markers, Reading, Source

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_OPENINGS = Markers(_OPEN, _FUNCTION)  # models sometimes omit the outer tag
# The line breaks around a value are not part of it. A parameter without an end tag ends at the next tag.
_VALUE_ENDS = Markers(f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
_NAME = re.compile(r"[^<>\n]*")


def read(source: Source, calls: CallEmitter) -> Reading[None]:
    while (opening := (yield from source.emit_until(_OPENINGS, ContentDelta, trim=True))) is not None:
        if not (yield from _read_call(source, calls, opening.endswith(_FUNCTION))):
            yield ContentDelta(opening)


def _read_call(source: Source, calls: CallEmitter, in_function: bool) -> Reading[bool]:
    source.hold()
    if not in_function:
        yield from source.skip_space()
        in_function = (yield from source.accept(_FUNCTION)) is not None
    name = (yield from _take_name(source)) if in_function else None
    if not name:
        source.rewind()
        return False
    source.release()
    yield calls.begin(name)
    arguments = TypedArguments(calls, name)
    while (yield from _read_parameter(source, arguments)):
        pass
    if (yield from source.accept_after_space(_FUNCTION_END)):
        yield from arguments.end()
    else:
        yield from calls.end(complete=False)
    yield from source.accept_after_space(_CLOSE)
    yield from source.skip_trailing_space()
    return True


def _read_parameter(source: Source, arguments: TypedArguments) -> Reading[bool]:
    source.hold()
    yield from source.skip_space()
    key = (yield from _take_name(source)) if (yield from source.accept(_PARAMETER)) else None
    if not key:
        source.rewind()
        return False
    source.release()
    yield from source.accept("\n")
    ending = yield from arguments.read(source, key, _VALUE_ENDS)
    if ending is not None and not ending.endswith(_PARAMETER_END):
        source.unread(len(ending))
    return ending is not None


def _take_name(source: Source) -> Reading[str | None]:
    name = yield from source.take_while(_NAME)
    return name.strip() if (yield from source.accept(">")) else None


def _write(writer: GrammarWriter, tools: Sequence[Tool], _: bool) -> str:
    def write_parameter(parameter: Parameter) -> str:
        value = bare_value(
            writer, parameter, f"\n{_PARAMETER_END}", (f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
        )
        begin = writer.terminals(f"{_PARAMETER}{parameter.name}>\n")
        return f"{begin} {value} GAP"

    alternatives = (
        f"{writer.terminals(f'{tool.name}>')} GAP {parameter_sequence(parameters, write_parameter)}"
        for tool, parameters in zip(tools, tool_parameters(tools, _NAME), strict=True)
    )
    function = f"{writer.terminals(_FUNCTION)} ({' | '.join(alternatives)}) {writer.terminals(_FUNCTION_END)}"
    return f"GAP {function} GAP {writer.terminals(_CLOSE)}"


QWEN3_CODER = ToolFormat(
    read, (_OPEN, _CLOSE), CallGrammar(_OPEN, _write, forbidden=(_FUNCTION,), name_pattern=_NAME)
)
