"""GLM-4.5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`."""

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
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_OPENING, _VALUE_ENDS = Markers(_OPEN), Markers(_VALUE_END)
_NAME = re.compile(r"[\w.\-]*")
_KEY_TEXT = re.compile(r"[^<>\n]*")


def read(source: Source, calls: CallEmitter) -> Reading[None]:
    while (opening := (yield from source.emit_until(_OPENING, ContentDelta, trim=True))) is not None:
        if not (yield from _read_call(source, calls)):
            yield ContentDelta(opening)


def _read_call(source: Source, calls: CallEmitter) -> Reading[bool]:
    source.hold()
    yield from source.skip_space()
    name = yield from source.take_while(_NAME)
    yield from source.skip_space()
    tag = yield from source.accept(_KEY, _CLOSE)
    if not name or tag is None:
        source.rewind()
        return False
    source.release()
    yield calls.begin(name)
    arguments = TypedArguments(calls, name)
    while tag == _KEY and (yield from _read_argument(source, arguments)):
        tag = yield from source.accept_after_space(_KEY, _CLOSE)
    if tag == _CLOSE:
        yield from arguments.end()
    else:
        yield from calls.end(complete=False)
    yield from source.skip_trailing_space()
    return True


def _read_argument(source: Source, arguments: TypedArguments) -> Reading[bool]:
    key = yield from source.take_while(_KEY_TEXT)
    closed = yield from source.accept(_KEY_END)
    yield from source.skip_space()
    if not closed or not (yield from source.accept(_VALUE)):
        return False
    return (yield from arguments.read(source, key.strip(), _VALUE_ENDS)) is not None


def _write(writer: GrammarWriter, tools: Sequence[Tool], _: bool) -> str:
    def write_parameter(parameter: Parameter) -> str:
        key = writer.terminals(_KEY, parameter.name, _KEY_END)
        return f"{key} GAP {writer.terminals(_VALUE)} {bare_value(writer, parameter, _VALUE_END)} GAP"

    alternatives = (
        f"{writer.terminals(tool.name)} GAP {parameter_sequence(parameters, write_parameter)}"
        for tool, parameters in zip(tools, tool_parameters(tools, _KEY_TEXT), strict=True)
    )
    return f"GAP ({' | '.join(alternatives)}) {writer.terminals(_CLOSE)}"


GLM45 = ToolFormat(
    read,
    (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
    CallGrammar(_OPEN, _write, name_pattern=_NAME),
)
