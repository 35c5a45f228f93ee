"""The registries of tool call formats and reasoning formats, and the reader of a block of reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.agents.calls import CallEmitter
from inflight.agents.events import ReasoningDelta
from inflight.agents.grammar_writer import CallGrammar
from inflight.agents.source import Markers, Reading, Source
from inflight.registry import Registry


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    read: Callable[[Source, CallEmitter], Reading[None]]  # reads a message after its reasoning, to the end
    markers: tuple[str, ...]  # texts that may be special tokens
    grammar: CallGrammar | None = None  # None if calls of this format are not written by `marker_answer`
    ends_reasoning: tuple[str, ...] = ()  # markers that a model may write instead of the end of its reasoning
    # The start of a message that the prompt has already opened, in the format's own markers.
    opened_by: Callable[[str], str] = lambda _: ""


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
class ReasoningMarkers:
    """The markers around a block of reasoning."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> str:
        """Return the opening marker if the prompt ends with it, so that the output starts inside the block."""
        return self.open if prompt.rstrip().endswith(self.open) else ""


# Harmony's reasoning is a channel rather than a block, and is read with the rest of that format.
REASONING_MARKERS = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "kimi_vl": ReasoningMarkers("◁think▷", "◁/think▷"),
}
HARMONY_REASONING = "harmony"
REASONING_FORMATS = (*REASONING_MARKERS, HARMONY_REASONING)


def read_reasoning(
    source: Source, markers: ReasoningMarkers, also_ends: tuple[str, ...] = ()
) -> Reading[None]:
    """Read the block of reasoning at the start of an output, if there is one, without surrounding white space.

    Later in the output the markers are text: an answer may be about them. The markers in `also_ends` end the block too,
    and are left for the next reader.
    """
    source.hold()
    yield from source.skip_space()
    if not (yield from source.accept(markers.open)):
        source.rewind()
        return
    source.release()
    source.in_reasoning = True
    yield from source.accept_after_space(markers.open)  # some models repeat the opening marker of the prompt
    yield from source.skip_space()
    ending = yield from source.emit_until(Markers(markers.close, *also_ends), ReasoningDelta, trim=True)
    source.in_reasoning = False
    if ending is not None and not ending.endswith(markers.close):
        source.unread(len(ending.lstrip()))
    yield from source.skip_space()
