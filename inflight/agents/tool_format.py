"""What every format of tool calls is, and the ones that there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.agents.calls import Calls
from inflight.agents.rule_writer import CallGrammar
from inflight.agents.source import Reading, Source
from inflight.registry import Registry


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    read: Callable[[Source, Calls], Reading[None]]  # a message without its reasoning, to the end
    markers: tuple[str, ...]  # that may be special tokens
    grammar: CallGrammar | None = None  # how calls are written; None where none can be
    ends_reasoning: tuple[
        str, ...
    ] = ()  # markers that a model also writes instead of the end of its reasoning
    opened: Callable[[str], str] = lambda _: (
        ""
    )  # what a prompt has begun of the message, in the format's own markers


TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "tool call parser",
    {
        "hermes": "inflight.agents.formats.hermes:HERMES",
        "qwen3_coder": "inflight.agents.formats.qwen3_coder:QWEN3_CODER",
        "glm45": "inflight.agents.formats.glm45:GLM45",
        "mistral": "inflight.agents.formats.mistral:MISTRAL",
        "deepseek_v3": "inflight.agents.formats.deepseek_v3:DEEPSEEK_V3",
        "kimi_k2": "inflight.agents.formats.kimi_k2:KIMI_K2",
        "harmony": "inflight.agents.formats.harmony:HARMONY",
        "llama3_json": "inflight.agents.formats.llama3_json:LLAMA3_JSON",
        "pythonic": "inflight.agents.formats.pythonic:PYTHONIC",
    },
)
