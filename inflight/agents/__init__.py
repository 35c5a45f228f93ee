"""Parsing and constraining tool calls and reasoning in model output.

Text and token ids go in, events come out. This package knows nothing about requests or servers.
"""

from inflight.agents.answer_grammar import answer_grammar
from inflight.agents.detect import (
    CallStyle,
    call_marker_ids,
    detect_calls,
    detect_reasoning_format,
    detect_tool_format,
    opens_reasoning,
    shows_tools,
)
from inflight.agents.formats.base import (
    REASONING_FORMATS,
    REASONING_MARKERS,
    TOOL_FORMATS,
    reasoning_format_name,
    tool_format_name,
)
from inflight.agents.grammar_writer import INPUT, INPUT_GRAMMAR, InputGrammar
from inflight.agents.parser import MessageParser
from inflight.agents.reading import (
    ArgumentsDelta,
    CalledFunction,
    ContentDelta,
    ParsedMessage,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)

__all__ = [
    "INPUT",
    "INPUT_GRAMMAR",
    "REASONING_FORMATS",
    "REASONING_MARKERS",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CallStyle",
    "CalledFunction",
    "ContentDelta",
    "InputGrammar",
    "MessageParser",
    "ParsedMessage",
    "ParserEvent",
    "ReasoningDelta",
    "ToolCallBegun",
    "ToolCallEnded",
    "answer_grammar",
    "call_marker_ids",
    "detect_calls",
    "detect_reasoning_format",
    "detect_tool_format",
    "opens_reasoning",
    "reasoning_format_name",
    "shows_tools",
    "tool_format_name",
]
