"""How a checkpoint writes calls and reasoning: as it was told at start, or as its chat template tells."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from inflight.agents import (
    REASONING_MARKERS,
    CallStyle,
    MessageParser,
    detect_calls,
    detect_reasoning_format,
    opens_reasoning,
    shows_tools,
)
from inflight.config import ModelConfig
from inflight.text import ChatTemplate, Tokenizer

logger = logging.getLogger(__name__)

NONE = "none"


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """Of one checkpoint."""

    tools: str | None  # by name, None where none is known
    reasoning: str | None
    style: CallStyle
    shows_tools: bool  # to the model
    opens_reasoning: bool  # by the prompt, where it is asked for

    @classmethod
    def of(cls, config: ModelConfig, template: ChatTemplate, tokenizer: Tokenizer | None) -> ChatFormats:
        """Renders the template some times: no work for an event loop."""
        reasoning = _forced(config.reasoning_parser)
        if config.reasoning_parser is None:
            reasoning = detect_reasoning_format(template, tokenizer)
        found = detect_calls(template, reasoning)
        tools = _forced(config.tool_call_parser)
        if config.tool_call_parser is None and found is not None:
            tools = found.tool_format
        style = CallStyle() if found is None else found.style
        logger.info("tool calls are read as %s, reasoning as %s", tools or NONE, reasoning or NONE)
        shows = found is not None or shows_tools(template)
        return cls(tools, reasoning, style, shows, opens_reasoning(template, reasoning))

    def reasoning_after(self, prompt: str) -> str | None:
        """The format of the reasoning that an answer may begin with."""
        is_asked_for = not self.opens_reasoning or REASONING_MARKERS[self.reasoning or ""].opened_by(prompt)
        return self.reasoning if is_asked_for else None


def check_parsers(config: ModelConfig) -> None:
    """Raises ConfigError for formats that there are not."""
    MessageParser(_forced(config.tool_call_parser), _forced(config.reasoning_parser))


def _forced(name: str | None) -> str | None:
    return None if name == NONE else name
