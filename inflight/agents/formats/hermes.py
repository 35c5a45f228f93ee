"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.agents.calls import CallEmitter
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.agents.json_reader import read_json_call
from inflight.agents.source import Markers, Reading, Source

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = Markers(_OPEN)


def read(source: Source, calls: CallEmitter) -> Reading[None]:
    while (opening := (yield from source.emit_until(_OPENING, ContentDelta, trim=True))) is not None:
        if not (yield from read_json_call(source, calls)):
            yield ContentDelta(opening)
            continue
        yield from source.accept_after_space(_CLOSE)
        yield from source.skip_trailing_space()


def _write(writer: GrammarWriter, tools: Sequence[Tool], _: bool) -> str:
    return f"GAP {writer.json_call(tools, 'arguments')} GAP {writer.terminals(_CLOSE)}"


HERMES = ToolFormat(read, (_OPEN, _CLOSE), CallGrammar(_OPEN, _write))
