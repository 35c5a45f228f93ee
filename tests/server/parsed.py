"""What parsers say of a few answers, and streams of server-sent events read back."""

from __future__ import annotations

import json
from typing import Any

from inflight.frontend.agents.source import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)

WHOLE: list[ParserEvent] = [
    ReasoningDelta("I should "),
    ReasoningDelta("add."),
    ContentDelta("Let me "),
    ContentDelta("add."),
    ToolCallBegun(0, "add", "call_1"),
    ArgumentsDelta(0, '{"a": '),
    ArgumentsDelta(0, "1}"),
    ToolCallEnded(0, True),
    ToolCallBegun(1, "now"),
    ArgumentsDelta(1, "{}"),
    ToolCallEnded(1, True),
]
CUT_SHORT: list[ParserEvent] = [
    ToolCallBegun(0, "add", "call_1"),
    ArgumentsDelta(0, '{"a": '),
    ToolCallEnded(0, False),
]


def read_events(stream: bytes) -> list[dict[str, Any]]:
    """The objects of named events, whose names are their types."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        if block.startswith(":"):  # a ping
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert stream.endswith(b"\n\n") or not stream
    return events
