"""What every format of tool calls is, and the ones that there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.agents.calls import Calls
from inflight.agents.events import ReasoningDelta
from inflight.agents.grammar_writer import CallGrammar
from inflight.agents.source import Markers, Reading, Source
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


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """What a block of reasoning begins and ends with."""

    open: str
    close: str

    def opened(self, prompt: str) -> str:
        """The beginning of a block that a prompt ends with, so that the output starts inside it."""
        return self.open if prompt.rstrip().endswith(self.open) else ""


# By name. Reasoning on channels of harmony is no block, and is read with the rest of that format.
THINKING = {
    "think": ThinkingMarkers("<think>", "</think>"),
    "mistral": ThinkingMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ThinkingMarkers("<seed:think>", "</seed:think>"),
    "kimi_vl": ThinkingMarkers("◁think▷", "◁/think▷"),
}
HARMONY_REASONING = "harmony"
REASONING_FORMATS = (*THINKING, HARMONY_REASONING)


def read_thinking(source: Source, markers: ThinkingMarkers, also_ends: tuple[str, ...] = ()) -> Reading[None]:
    """The block at the beginning of an output, if there is one, without the white space at its edges.

    Later in the output the markers are text: an answer may be about them. `also_ends` are markers that end the block
    and are left for the next reader.
    """
    source.hold()
    yield from source.skip_space()
    if not (yield from source.accept(markers.open)):
        source.rewind()
        return
    source.release()
    source.in_reasoning = True
    yield from source.accept_after_space(markers.open)  # some models open what the prompt has opened
    yield from source.skip_space()
    ending = yield from source.until(Markers(markers.close, *also_ends), ReasoningDelta, trim=True)
    source.in_reasoning = False
    if ending is not None and not ending.endswith(markers.close):
        source.back(len(ending.lstrip()))
    yield from source.skip_space()
