"""What a parser says while it reads an output, and the message that it all adds up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The model calls a function. `id` is the model's own name for the call, in formats that have one."""

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
    """`complete` unless the output broke off, or broke the format's rules, inside the call."""

    index: int
    complete: bool


ParserEvent = ContentDelta | ReasoningDelta | ToolCallBegun | ArgumentsDelta | ToolCallEnded


def joined(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """The same, with deltas of one kind in a row as one."""
    told: list[ParserEvent] = []
    for _, group in groupby(events, type):
        found = list(group)
        deltas = [event for event in found if not isinstance(event, ToolCallBegun | ToolCallEnded)]
        if deltas:
            told.append(replace(deltas[0], text="".join(delta.text for delta in deltas)))
        else:
            told += found
    return told


@dataclass(slots=True)
class CalledFunction:
    """One call of a message."""

    name: str
    arguments: str = ""  # JSON text
    id: str | None = None
    complete: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """A message as its events have made it so far."""

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
