"""The registries of tool call formats and reasoning formats, and the emitter of a message's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.agents.grammar_writer import CallGrammar
from inflight.agents.reading import (
    ArgumentsDelta,
    Markers,
    ParserEvent,
    Reading,
    Source,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.agents.values import resolve_reference
from inflight.registry import Registry


def _read_no_calls(_source: Source, _calls: CallEmitter, _opening: str) -> Reading[bool]:
    yield from ()
    return False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls: after an opening, or for some at the start of a message."""

    markers: tuple[str, ...] = ()  # texts that may be special tokens
    openings: Markers = Markers()  # noqa: RUF009  # it is immutable
    # Reads the calls after an opening, which is "" at the start of a message. Returns False, and reads nothing, if
    # there are none.
    read_calls: Callable[[Source, CallEmitter, str], Reading[bool]] = _read_no_calls
    grammar: CallGrammar | None = None  # None if calls of this format are not written by `marker_answer`
    ends_reasoning: tuple[str, ...] = ()  # markers that a model may write instead of the end of its reasoning
    # For a format whose messages are more than text and calls: reads a whole message.
    read_message: Callable[[Source, CallEmitter], Reading[None]] | None = None
    # Returns the start of a message that the prompt has already opened, in the format's own markers.
    opened_by: Callable[[str], str] = lambda _: ""


TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "tool call parser",
    closed=True,
    targets={
        "hermes": "inflight.agents.formats.json_calls:HERMES",
        "qwen3_coder": "inflight.agents.formats.tagged:QWEN3_CODER",
        "glm45": "inflight.agents.formats.tagged:GLM45",
        "mistral": "inflight.agents.formats.json_calls:MISTRAL",
        "deepseek_v3": "inflight.agents.formats.sections:DEEPSEEK_V3",
        "kimi_k2": "inflight.agents.formats.sections:KIMI_K2",
        "harmony": "inflight.agents.formats.harmony:HARMONY",
        "llama3_json": "inflight.agents.formats.json_calls:LLAMA3_JSON",
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


class CallEmitter:
    """Numbers the calls of a message and makes their events: `begin`, any number of `arguments`, `end`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Create an emitter for the tools of a request: `{"type": "function", "function": {"name": ..., ...}}`."""
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters")
        self._index = -1
        self._empty = True  # the current call has no arguments yet

    def may_call(self, name: str) -> bool:
        """Return whether the tool exists. Formats without markers check this: their calls could be ordinary text."""
        return not self._parameters or name in self._parameters

    def schema(self, function: str, parameter: str) -> Any:
        """Return the JSON schema of a parameter, or None if it has none."""
        schema = self._parameters.get(function)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return None
        return resolve_reference(properties.get(parameter), schema)

    def begin(self, name: str, id: str | None = None) -> ParserEvent:
        self._index += 1
        self._empty = True
        return ToolCallBegun(self._index, name, id)

    def arguments(self, text: str) -> ParserEvent:
        self._empty = self._empty and text.isspace()
        return ArgumentsDelta(self._index, text)

    def end(self, complete: bool = True) -> Iterator[ParserEvent]:
        """End the call. A complete call without arguments gets an empty object."""
        if complete and self._empty:
            yield ArgumentsDelta(self._index, "{}")
        yield ToolCallEnded(self._index, complete)
