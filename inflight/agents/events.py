"""The events that a parser emits while it reads an output, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The start of a tool call. `id` is the model's own id for the call, in formats that have one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The end of a tool call. `complete` is false if the output ended or violated the format inside the call."""

    index: int
    complete: bool


ParserEvent = ContentDelta | ReasoningDelta | ToolCallBegun | ArgumentsDelta | ToolCallEnded


def merge_deltas(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """Return the events with consecutive deltas of the same kind merged into one."""
    merged: list[ParserEvent] = []
    for _, group in groupby(events, type):
        same_kind = list(group)
        deltas = [event for event in same_kind if not isinstance(event, ToolCallBegun | ToolCallEnded)]
        if deltas:
            merged.append(replace(deltas[0], text="".join(delta.text for delta in deltas)))
        else:
            merged += same_kind
    return merged


@dataclass(slots=True)
class CalledFunction:
    """One tool call of a message."""

    name: str
    arguments: str = ""  # JSON text
    id: str | None = None
    complete: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """The message that the events so far add up to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[CalledFunction] = field(default_factory=list)

    def add(self, events: Iterable[ParserEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallBegun(_, name, id):
                    self.tool_calls.append(CalledFunction(name, id=id))
                case ArgumentsDelta(index, text):
                    self.tool_calls[index].arguments += text
                case ToolCallEnded(index, complete):
                    self.tool_calls[index].complete = complete
