"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import Calls, TypedArguments
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import (
    CallGrammar,
    Parameter,
    RuleWriter,
    Tool,
    all_of,
    bare_value,
    parameters,
)
from inflight.agents.source import Markers, Reading, Source

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_OPENINGS = Markers(_OPEN, _FUNCTION)  # the outer tag is forgotten now and then
# A line break on both sides is not part of a value. A forgotten end of a parameter is seen at the next tag.
_VALUE_ENDS = Markers(f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
_NAME = re.compile(r"[^<>\n]*")


def read(source: Source, calls: Calls) -> Reading[None]:
    while (opening := (yield from source.until(_OPENINGS, ContentDelta, trim=True))) is not None:
        if not (yield from _read_call(source, calls, opening.endswith(_FUNCTION))):
            yield ContentDelta(opening)


def _read_call(source: Source, calls: Calls, in_function: bool) -> Reading[bool]:
    source.hold()
    if not in_function:
        yield from source.skip_space()
        in_function = (yield from source.accept(_FUNCTION)) is not None
    name = (yield from _name(source)) if in_function else None
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
    yield from source.skip_last_space()
    return True


def _read_parameter(source: Source, arguments: TypedArguments) -> Reading[bool]:
    source.hold()
    yield from source.skip_space()
    key = (yield from _name(source)) if (yield from source.accept(_PARAMETER)) else None
    if not key:
        source.rewind()
        return False
    source.release()
    yield from source.accept("\n")
    ending = yield from arguments.read(source, key, _VALUE_ENDS)
    if ending is not None and not ending.endswith(_PARAMETER_END):
        source.back(len(ending))
    return ending is not None


def _name(source: Source) -> Reading[str | None]:
    name = yield from source.take_while(_NAME)
    return name.strip() if (yield from source.accept(">")) else None


def _write(writer: RuleWriter, tools: Sequence[Tool], _: bool) -> str:
    def written(parameter: Parameter) -> str:
        value = bare_value(
            writer, parameter, f"\n{_PARAMETER_END}", (f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
        )
        begin = writer.marked(f"{_PARAMETER}{parameter.name}>\n")
        return f"{begin} {value} GAP"

    ways = (
        f"{writer.marked(f'{tool.name}>')} GAP {all_of(given, written)}"
        for tool, given in zip(tools, parameters(tools, _NAME), strict=True)
    )
    function = f"{writer.marked(_FUNCTION)} ({' | '.join(ways)}) {writer.marked(_FUNCTION_END)}"
    return f"GAP {function} GAP {writer.marked(_CLOSE)}"


QWEN3_CODER = ToolFormat(read, (_OPEN, _CLOSE), CallGrammar(_OPEN, _write, never=(_FUNCTION,), names=_NAME))
