"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta
from inflight.agents.json_calls import read_json_call
from inflight.agents.source import Markers, Reading, Source
from inflight.agents.tool_format import ToolFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = Markers(_OPEN)


def read(source: Source, calls: Calls) -> Reading[None]:
    while (opening := (yield from source.until(_OPENING, ContentDelta, trim=True))) is not None:
        if not (yield from read_json_call(source, calls)):
            yield ContentDelta(opening)
            continue
        yield from source.accept_after_space(_CLOSE)
        yield from source.skip_last_space()


HERMES = ToolFormat(read, (_OPEN, _CLOSE))
