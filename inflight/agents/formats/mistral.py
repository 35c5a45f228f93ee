"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`.

Newer models write `[TOOL_CALLS]name[ARGS]{...}` or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` for each call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import CallEmitter
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.agents.json_reader import emit_arguments, read_json_call
from inflight.agents.source import Markers, Reading, Source

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPENING = Markers(_CALLS)
_NAME = re.compile(r"[\w.\-]*")


def read(source: Source, calls: CallEmitter) -> Reading[None]:
    while (opening := (yield from source.emit_until(_OPENING, ContentDelta, trim=True))) is not None:
        is_call = (yield from _read_named(source, calls)) or (yield from _read_list(source, calls))
        if not is_call:
            yield ContentDelta(opening)


def _read_named(source: Source, calls: CallEmitter) -> Reading[bool]:
    source.hold()
    yield from source.skip_space()
    name = yield from source.take_while(_NAME)
    call_id = None
    if (yield from source.accept(_ID)):
        call_id = yield from source.take_while(_NAME)
    marked = yield from source.accept(_ARGS)
    yield from source.skip_space()
    if not name or not (marked or (yield from source.peek()) == "{"):
        source.rewind()
        return False
    source.release()
    yield calls.begin(name, call_id)
    complete = yield from emit_arguments(source, calls)
    yield from calls.end(complete)
    yield from source.skip_trailing_space()
    return True


def _read_list(source: Source, calls: CallEmitter) -> Reading[bool]:
    # The bracket separates the first call from what precedes it, as the comma does for the others.
    is_call = yield from read_json_call(source, calls, separator="[")
    if not is_call:
        return False
    while is_call:
        is_call = yield from read_json_call(source, calls, separator=",")
    yield from source.accept_after_space("]")
    yield from source.skip_trailing_space()
    return True


def _write(writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
    if writer.is_special(_ARGS):  # a newer model
        alternatives = (
            f"{writer.terminals(tool.name, _ARGS)} {arguments}" for tool, arguments in writer.arguments(tools)
        )
        return f"({' | '.join(alternatives)})"
    call = writer.json_call(tools, "arguments")
    more = f'(GAP "," GAP {call})*' if parallel else ""
    return f'GAP "[" GAP {call} {more} GAP "]"'


MISTRAL = ToolFormat(read, (_CALLS, _ID, _ARGS), CallGrammar(_CALLS, _write, name_pattern=_NAME))
