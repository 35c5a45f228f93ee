"""The registries of tool call formats and reasoning formats, and the emitter of a message's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.frontend.agents.grammar_writer import CallGrammar
from inflight.frontend.agents.source import (
    ArgumentsDelta,
    Markers,
    ParserEvent,
    Reading,
    Source,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.frontend.agents.values import NOT_JSON, parse_json, resolve_reference
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
    endings: tuple[str, ...] = ()  # markers after calls, which models also omit, repeat and misplace
    grammar: CallGrammar | None = None  # None if calls of this format are not written by `marker_answer`
    # For a format whose messages are more than text and calls: reads a whole message.
    read_message: Callable[[Source, CallEmitter], Reading[None]] | None = None
    # Returns the start of a message that the prompt has already opened, in the format's own markers.
    opened_by: Callable[[str], str] = lambda _: ""


# By the module of their shape. Detection tries them in this order.
_FORMATS = {
    "json_calls": (
        *("hermes", "mistral", "longcat", "granite_20b_fc", "phi4_mini", "jamba", "internlm2", "nemotron"),
        *("cohere_command", "apertus", "gigachat3"),
    ),
    "tagged": (
        *("qwen3_coder", "glm45", "seed_oss", "minimax_m2", "deepseek_v32", "deepseek_v4", "step3", "hy_v3"),
        *("solar_open2", "minicpm5", "kimi_k3"),
    ),
    "sections": ("deepseek_v3", "kimi_k2"),
    "gemma": ("gemma4", "functiongemma"),
    "harmony": ("harmony",),
    "pythonic": ("olmo3", "lfm2"),
}
# Without markers: tried last.
_BARE_FORMATS = {"json_calls": ("llama3_json", "xlam", "granite"), "pythonic": ("pythonic",)}
TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "tool call parser",
    closed=True,
    targets={
        name: f"inflight.frontend.agents.formats.{module}:{name.upper()}"
        for formats in (_FORMATS, _BARE_FORMATS)
        for module, names in formats.items()
        for name in names
    },
)

# vLLM's names for the formats of other names.
_TOOL_ALIASES = {
    **dict.fromkeys(("granite4", "ernie45"), "hermes"),
    **dict.fromkeys(("qwen3_xml", "mimo", "step3p5"), "qwen3_coder"),
    **dict.fromkeys(("glm47", "poolside_v1"), "glm45"),
    **dict.fromkeys(("hunyuan_a13b", "minimax"), "jamba"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere_command"),
    "deepseek_v31": "deepseek_v3",
    "granite-20b-fc": "granite_20b_fc",
    "internlm": "internlm2",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
}


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around a block of reasoning, and in some formats around the answer after it."""

    open: str
    close: str
    other: tuple[str, str] = ("", "")  # another pair that means the same
    label: str = ""  # a word after the opening that is not part of the reasoning
    answer: tuple[str, ...] = ()  # before the answer, after it, and others that are not part of it
    tokens: tuple[str, ...] = ()  # that the markers consist of; () if each is one
    mentions: tuple[str, ...] = ()  # how a template shows this format; () if by the end of reasoning

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.open, self.other[0])))

    @property
    def closes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.close, self.other[1])))

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return self.tokens or (*self.opens, *self.closes, *self.answer)

    def opened_by(self, prompt: str) -> str:
        """Return the opening marker if the prompt ends with it, so that the output starts inside the block."""
        return self.open if prompt.rstrip().removesuffix(self.label).endswith(self.open) else ""


# Harmony's reasoning is a channel rather than a block, and is read with the rest of that format.
REASONING_MARKERS = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "hunyuan_a13b": ReasoningMarkers(
        "<think>", "</think>", answer=("<answer>", "</answer>"), mentions=("</think>", "<answer>")
    ),
    "ernie45": ReasoningMarkers(
        "<think>", "</think>", answer=("<response>", "</response>"), mentions=("</think>", "<response>")
    ),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "kimi_vl": ReasoningMarkers("◁think▷", "◁/think▷"),
    "kimi_k3": ReasoningMarkers(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        mentions=("<|open|>", "<|close|>", "<|sep|>", "think"),
    ),
    "gemma4": ReasoningMarkers("<|channel>", "<channel|>", label="thought"),
    "cohere_command": ReasoningMarkers(
        "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "granite": ReasoningMarkers(
        "Here is my thought process:",
        "Here is my response:",
        other=("Here's my thought process:", "Here's my response:"),
    ),
}
HARMONY_REASONING = "harmony"
REASONING_FORMATS = (*REASONING_MARKERS, HARMONY_REASONING)

_REASONING_ALIASES = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "hy_v3"), "think"
    ),
    **dict.fromkeys(("kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1"), "think"),
    **dict.fromkeys(("qwen3", "step3", "step3p5"), "think"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere_command"),
    **dict.fromkeys(("openai", "openai_gptoss"), HARMONY_REASONING),
}


def tool_format_name(name: str | None) -> str | None:
    """Return this project's name for a tool call format."""
    return None if name is None else _TOOL_ALIASES.get(name, name)


def reasoning_format_name(name: str | None) -> str | None:
    """Return this project's name for a reasoning format."""
    return None if name is None else _REASONING_ALIASES.get(name, name)


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
        self._arguments: list[str] = []  # of the current call

    def may_call(self, name: str, unless_known: bool = True) -> bool:
        """Return whether the tool exists, or `unless_known` if the request's tools are not known.

        Formats without markers check this: their calls could be ordinary text.
        """
        return name in self._parameters if self._parameters else unless_known

    def schema(self, function: str, parameter: str) -> Any:
        """Return the JSON schema of a parameter, or None if it has none."""
        schema = self._parameters.get(function)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return None
        return resolve_reference(properties.get(parameter), schema)

    def begin(self, name: str, id: str | None = None) -> ParserEvent:
        self._index += 1
        self._arguments = []
        return ToolCallBegun(self._index, name, id)

    def arguments(self, text: str) -> ParserEvent:
        self._arguments.append(text)
        return ArgumentsDelta(self._index, text)

    def end(self, complete: bool = True) -> Iterator[ParserEvent]:
        """End the call. A complete call without arguments gets an empty object; invalid JSON is never complete."""
        text = "".join(self._arguments)
        if complete and not text.strip():
            text = "{}"
            yield ArgumentsDelta(self._index, text)
        yield ToolCallEnded(self._index, complete and parse_json(text) is not NOT_JSON)
