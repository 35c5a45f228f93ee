"""Tool calls and reasoning in what a model writes. Text and token ids in, events out; no server here."""

from inflight.agents.answer_grammar import answer_grammar
from inflight.agents.detect import (
    CallStyle,
    detect_calls,
    detect_reasoning_format,
    detect_tool_format,
    opens_reasoning,
    shows_tools,
)
from inflight.agents.events import (
    ArgumentsDelta,
    CalledFunction,
    ContentDelta,
    ParsedMessage,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.agents.formats.base import REASONING_FORMATS, THINKING, TOOL_FORMATS
from inflight.agents.parser import MessageParser

__all__ = [
    "REASONING_FORMATS",
    "THINKING",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CallStyle",
    "CalledFunction",
    "ContentDelta",
    "MessageParser",
    "ParsedMessage",
    "ParserEvent",
    "ReasoningDelta",
    "ToolCallBegun",
    "ToolCallEnded",
    "answer_grammar",
    "detect_calls",
    "detect_reasoning_format",
    "detect_tool_format",
    "opens_reasoning",
    "shows_tools",
]
