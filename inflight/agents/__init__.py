"""Tool calls and reasoning in what a model writes. Text and token ids in, events out; no server here."""

from inflight.agents.answer_grammar import answer_grammar
from inflight.agents.detect import detect_reasoning_format, detect_tool_format
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
from inflight.agents.parser import MessageParser
from inflight.agents.thinking import REASONING_FORMATS
from inflight.agents.tool_format import TOOL_FORMATS

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CalledFunction",
    "ContentDelta",
    "MessageParser",
    "ParsedMessage",
    "ParserEvent",
    "ReasoningDelta",
    "ToolCallBegun",
    "ToolCallEnded",
    "answer_grammar",
    "detect_reasoning_format",
    "detect_tool_format",
]
