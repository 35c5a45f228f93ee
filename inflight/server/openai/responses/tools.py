"""The tools of a request to /v1/responses, as the functions that models know.

A tool of a namespace is a function with a joined name. A custom tool, whose input is free text, is a function with one
string parameter. Tools that OpenAI's servers would run are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import clipped
from inflight.frontend.agents.answer_grammar import NamedTool, ToolChoice
from inflight.frontend.agents.grammar_writer import INPUT, INPUT_GRAMMAR, InputGrammar
from inflight.frontend.chat import checked_tools
from inflight.server.errors import ApiError, invalid
from inflight.server.openai.responses.schemas import (
    AllowedTools,
    ChosenTool,
    FreeTextTool,
    FunctionTool,
    GrammarFormat,
    NamespaceTool,
    ResponseConversationBody,
    ServerTool,
)

_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool of the client, under its own name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools that the model may call."""

    functions: list[dict[str, Any]] = field(default_factory=list)  # in the format of chats
    choice: ToolChoice = "auto"
    by_name: Mapping[str, CallableTool] = field(default_factory=dict)  # by the name that the model sees
    dropped: Sequence[str] = ()  # types of tools that the server would have to run

    @classmethod
    def from_body(cls, body: ResponseConversationBody) -> ResponseTools:
        """Read the tools of a body and which of them may be called. Raise ApiError if these do not fit together."""
        by_name: dict[str, CallableTool] = {}
        functions: list[dict[str, Any]] = []
        for tool, namespace, path in _flattened(body):
            name = shown_name(tool.name, namespace)
            by_name[name] = CallableTool(tool.name, namespace, isinstance(tool, FreeTextTool))
            functions.append(_function(tool, name, path))
        dropped = [tool.type for tool in body.tools or () if isinstance(tool, ServerTool)]
        tools = checked_tools([{"type": "function", "function": function} for function in functions])
        names, choice = _choice(body, by_name)
        if choice == "required" and dropped and not names:
            raise _wrong_choice(f"requires {', '.join(dropped)}", "the server itself runs no tools")
        return cls([tool for tool in tools if tool["function"]["name"] in names], choice, by_name, dropped)


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the prompt and in calls of the model."""
    return name if namespace is None else f"{namespace}__{name}"


def _flattened(
    body: ResponseConversationBody,
) -> Iterator[tuple[FunctionTool | FreeTextTool, str | None, str]]:
    """Yield each tool that the client runs, its namespace, and where it is in the body."""
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, NamespaceTool):
            for inner_index, inner in enumerate(tool.tools):
                yield inner, tool.name, f"tools[{index}].tools[{inner_index}]"
        elif not isinstance(tool, ServerTool):
            yield tool, None, f"tools[{index}]"


def _function(tool: FunctionTool | FreeTextTool, name: str, path: str) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return {**tool.model_dump(include={"description", "parameters", "strict"}), "name": name}
    function: dict[str, Any] = {
        "name": name,
        "description": tool.description,
        "parameters": _INPUT_SCHEMA,
        "strict": True,
    }
    if isinstance(tool.format, GrammarFormat):
        syntax, definition = tool.format.syntax, tool.format.definition
        note = f"The {INPUT} must match this {'Lark grammar' if syntax == 'lark' else 'regex'}:\n{definition}"
        function["description"] = "\n\n".join(filter(None, (tool.description, note)))
        function[INPUT_GRAMMAR] = InputGrammar(syntax, definition, f"{path}.format.definition")
    return function


def _choice(
    body: ResponseConversationBody, by_name: Mapping[str, CallableTool]
) -> tuple[set[str], ToolChoice]:
    """Return the names of the tools that are offered, and whether one must be called."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return set(by_name), choice or "auto"
    chosen = choice.tools if isinstance(choice, AllowedTools) else [choice]
    names = set()
    for tool in chosen:
        if isinstance(tool, ChosenTool):
            names.add(shown_name(tool.name, tool.namespace))
        elif not isinstance(choice, AllowedTools):
            raise _wrong_choice(f"requires {tool.type}", "the server itself runs no tools")
    unknown = names - by_name.keys()
    if unknown:
        raise _wrong_choice(f"names {clipped(', '.join(sorted(unknown)), 200)}", "there are no such tools")
    if isinstance(choice, ChosenTool):
        return set(by_name), NamedTool(*names)
    return names, choice.mode if isinstance(choice, AllowedTools) else "auto"


def _wrong_choice(problem: str, reason: str) -> ApiError:
    return invalid("tool_choice", f"tool_choice {problem}: {reason}")


_BEFORE_INPUT = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MAX_BEFORE_INPUT = 1024  # characters; white space is allowed there, and models could write it for ever
_MAX_INCOMPLETE = len(r"\ud83d\ude4")
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
_HALF_PAIR = re.compile(r"\\u[dD][89abAB]..\Z")


class InputDecoder:
    """Decodes the free text in the arguments of a custom tool's call while their JSON arrives."""

    def __init__(self) -> None:
        self._is_inside = False
        self._is_over = False
        self._rest = ""  # JSON that is not decoded yet
        self._pieces: list[str] = []

    def feed(self, text: str) -> str:
        """Return the text that is complete with this JSON."""
        if self._is_over:
            return ""
        self._rest += text
        if not self._is_inside:
            start = _BEFORE_INPUT.match(self._rest)
            if start is None:
                self._is_over = len(self._rest) > _MAX_BEFORE_INPUT
                return ""
            self._is_inside, self._rest = True, self._rest[start.end() :]
        match = _WHOLE_CHARACTERS.match(self._rest)
        whole = _HALF_PAIR.sub("", match[0] if match else "")
        self._rest = self._rest[len(whole) :]
        self._is_over = len(self._rest) > _MAX_INCOMPLETE  # the string has ended, or is invalid
        self._pieces.append(_text_of(f'"{whole}"'))
        return self._pieces[-1]

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)


def _text_of(string: str) -> str:
    """Return the text of a JSON string, which may have half of a surrogate pair."""
    text: str = json.loads(string, strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
