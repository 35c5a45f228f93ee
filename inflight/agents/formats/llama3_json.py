"""Llama 3.x: a message that is `{"name": ..., "parameters": {...}}`, or several of these with `;` between them.

Nothing marks them but their shape, or `<|python_tag|>`. So an object counts only at the beginning of a message or after
that token, and only if it names a tool that there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, RuleWriter, Tool
from inflight.agents.json_reader import read_json_call
from inflight.agents.source import Markers, Reading, Source

_TAG = "<|python_tag|>"
_TAGS = Markers(_TAG)


def read(source: Source, calls: Calls) -> Reading[None]:
    yield from _read_calls(source, calls)
    while (tag := (yield from source.until(_TAGS, ContentDelta, trim=True))) is not None:
        if not (yield from _read_calls(source, calls)):
            yield ContentDelta(tag)


def _read_calls(source: Source, calls: Calls) -> Reading[bool]:
    found = yield from read_json_call(source, calls, only_known=True)
    if not found:
        return False
    while found:
        found = yield from read_json_call(source, calls, separator=";", only_known=True)
    yield from source.skip_last_space()
    return True


def _write(writer: RuleWriter, tools: Sequence[Tool], parallel: bool) -> str:
    call = writer.json_call(tools, "parameters")
    return f'GAP {call} (GAP ";" GAP {call})*' if parallel else f"GAP {call}"


LLAMA3_JSON = ToolFormat(read, (_TAG,), CallGrammar(_TAG, _write, repeats=False, bare="{"))
