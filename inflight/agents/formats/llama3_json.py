"""Llama 3.x: a message consisting of `{"name": ..., "parameters": {...}}`, or of several separated by `;`.

Only their shape or a preceding `<|python_tag|>` marks them as calls. So an object counts only at the start of a message
or after that token, and only if it names one of the request's tools.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.agents.calls import CallEmitter
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.agents.json_reader import read_json_call
from inflight.agents.source import Markers, Reading, Source

_TAG = "<|python_tag|>"
_TAGS = Markers(_TAG)


def read(source: Source, calls: CallEmitter) -> Reading[None]:
    yield from _read_calls(source, calls)
    while (tag := (yield from source.emit_until(_TAGS, ContentDelta, trim=True))) is not None:
        if not (yield from _read_calls(source, calls)):
            yield ContentDelta(tag)


def _read_calls(source: Source, calls: CallEmitter) -> Reading[bool]:
    is_call = yield from read_json_call(source, calls, only_known=True)
    if not is_call:
        return False
    while is_call:
        is_call = yield from read_json_call(source, calls, separator=";", only_known=True)
    yield from source.skip_trailing_space()
    return True


def _write(writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
    call = writer.json_call(tools, "parameters")
    return f'GAP {call} (GAP ";" GAP {call})*' if parallel else f"GAP {call}"


LLAMA3_JSON = ToolFormat(read, (_TAG,), CallGrammar(_TAG, _write, repeats_opening=False, bare_start="{"))
