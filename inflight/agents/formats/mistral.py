"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and in newer models, for each call,
`[TOOL_CALLS]name[ARGS]{...}` or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, RuleWriter, Tool
from inflight.agents.json_reader import read_arguments, read_json_call
from inflight.agents.source import Markers, Reading, Source

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPENING = Markers(_CALLS)
_NAME = re.compile(r"[\w.\-]*")


def read(source: Source, calls: Calls) -> Reading[None]:
    while (opening := (yield from source.until(_OPENING, ContentDelta, trim=True))) is not None:
        found = (yield from _read_named(source, calls)) or (yield from _read_list(source, calls))
        if not found:
            yield ContentDelta(opening)


def _read_named(source: Source, calls: Calls) -> Reading[bool]:
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
    complete = yield from read_arguments(source, calls)
    yield from calls.end(complete)
    yield from source.skip_last_space()
    return True


def _read_list(source: Source, calls: Calls) -> Reading[bool]:
    # The bracket is the separator before the first call, as the comma is before the others.
    found = yield from read_json_call(source, calls, separator="[")
    if not found:
        return False
    while found:
        found = yield from read_json_call(source, calls, separator=",")
    yield from source.accept_after_space("]")
    yield from source.skip_last_space()
    return True


def _write(writer: RuleWriter, tools: Sequence[Tool], parallel: bool) -> str:
    """Newer models have a token before the arguments."""
    if writer.is_special(_ARGS):
        ways = (f"{writer.marked(tool.name, _ARGS)} {said}" for tool, said in writer.arguments(tools))
        return f"({' | '.join(ways)})"
    call = writer.json_call(tools, "arguments")
    more = f'(GAP "," GAP {call})*' if parallel else ""
    return f'GAP "[" GAP {call} {more} GAP "]"'


MISTRAL = ToolFormat(read, (_CALLS, _ID, _ARGS), CallGrammar(_CALLS, _write, names=_NAME))
