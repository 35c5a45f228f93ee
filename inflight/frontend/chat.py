"""A conversation, and how its answer is to be, whatever API it came by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from inflight.agents import CallStyle
from inflight.errors import ParameterError, shown

MAX_TOOLS = 512
MAX_NAME_LENGTH = 256
SHORT_ID_LENGTH = 9
# What clients note on an answer and send back with it: openai's helpers, litellm. Not for the model.
CLIENT_NOTES = frozenset({"parsed", "provider_specific_fields", "annotations", "refusal", "audio"})
_TOOL_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME_LENGTH}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that is to be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages and tools in the shape of OpenAI's chats. Texts in parts, arguments as JSON text or as objects, content
    that is not there: all of it is taken."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None  # for templates that know it; "none": no reasoning
    max_reasoning_tokens: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        budget = self.max_reasoning_tokens
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise ParameterError(
                f"max_reasoning_tokens is {shown(budget)}: it must be an integer of at least 0",
                param="max_reasoning_tokens",
            )
        if not isinstance(self.reasoning_effort, str | None):
            raise ParameterError(
                f"reasoning_effort is {shown(self.reasoning_effort)}: it must be a word",
                param="reasoning_effort",
            )

    @classmethod
    def of(
        cls,
        messages: Sequence[Any],
        *,
        tools: Any = None,
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        max_reasoning_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> ChatRequest:
        """From what callers of `chat` give. Raises ParameterError. A reply is begun unless the last message is to be
        continued."""
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        return cls(
            _dumped(messages),
            checked_tools(tools),
            tool_choice_of(tool_choice),
            parallel_tool_calls,
            reasoning_effort,
            max_reasoning_tokens,
            chat_template_kwargs or {},
            begins,
            continue_final_message,
        )

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]]:
        """Those that the model gets to see."""
        return () if self.tool_choice == "none" else self.tools


def _dumped(messages: Any) -> Any:
    """Messages may be objects of clients, such as the answer of an OpenAI client, which go on the wire as dicts."""
    if not isinstance(messages, list | tuple):
        return messages
    return [message.model_dump() if hasattr(message, "model_dump") else message for message in messages]


def tool_choice_of(given: Any) -> ToolChoice:
    """A choice as requests have it: a word, or an object that names a function."""
    if given is None or given == "auto":
        return "auto"
    if given == "none":
        return "none"
    if given == "required":
        return "required"
    if isinstance(given, NamedTool):
        return given
    if isinstance(given, Mapping) and given.get("type") == "function":
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return NamedTool(name)
    kind = given.get("type") if isinstance(given, Mapping) else None
    raise _refusal(
        "tool_choice",
        f"tool_choice is {shown(given)}: "
        + (
            f"{kind} is not supported; send only the tools that may be called"
            if kind in ("allowed_tools", "custom")
            else "it must be none, auto, required, or name a function: "
            '{"type": "function", "function": {"name": ...}}'
        ),
    )


def checked_tools(given: Any) -> list[dict[str, Any]]:
    """Tools as requests have them. Raises ParameterError."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _refusal("tools", f"tools is {shown(given)}: it must be a list of tools")
    if len(given) > MAX_TOOLS:
        raise _refusal("tools", f"tools has {len(given)} items: at most {MAX_TOOLS} are allowed")
    tools = [_checked_tool(f"tools[{index}]", tool) for index, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _refusal("tools", f"tools[{index}].function.name is {name!r}, as that of a tool before it")
    return tools


def num_characters(value: Any) -> int:
    """Of all that a template may put into the prompt, not the contents of messages alone. A number is one, whatever its
    digits."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, (*value, *value.values())))
    return sum(map(num_characters, value)) if isinstance(value, list) else 1


def _checked_tool(where: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise _refusal("tools", f"{where} is {shown(tool)}: only tools of type function are supported", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refusal("tools", f"{where}.function is {shown(function)}: it must be an object", where)
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise _refusal(
            "tools",
            f"{where}.function.name is {shown(name)}: it must have 1 to {MAX_NAME_LENGTH} letters, digits or "
            "any of _.:/-",
            where,
        )
    found = {key: value for key, value in function.items() if value is not None}
    for key, type_, words in (
        ("description", str, "a text"),
        ("parameters", Mapping, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if key in found and not isinstance(found[key], type_):
            raise _refusal(
                "tools", f"{where}.function.{key} is {shown(found[key])}: it must be {words}", where
            )
    return {**tool, "function": found}


def _refusal(param: str, message: str, where: str | None = None) -> ParameterError:
    return ParameterError(message, param=where or param, code="invalid_value")


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as a template reads them: each with a schema, and without `strict`, which no model was trained on."""
    return [{**tool, "function": _shown_function(tool["function"])} for tool in tools]


def _shown_function(function: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in function.items() if key != "strict"}
    found.setdefault("parameters", {"type": "object", "properties": {}})
    return found


def template_messages(messages: Sequence[Any], style: CallStyle) -> list[Any]:
    """Messages as a template reads them. What is no message is left as it is, for whoever checks them."""
    return [_message(message, style) if isinstance(message, Mapping) else message for message in messages]


def _message(message: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None and name not in CLIENT_NOTES}
    reasoning = found.pop("reasoning", None)
    if isinstance(reasoning, str):
        found.setdefault("reasoning_content", reasoning)
    content = found.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        # Not every template can read parts.
        found["content"] = "".join(part["text"] for part in content)
    elif content is None and found.get("role") == "assistant":
        found["content"] = style.empty_content
    calls = found.get("tool_calls")
    if isinstance(calls, list | tuple):
        found["tool_calls"] = [_call(call, style) if isinstance(call, Mapping) else call for call in calls]
    if style.short_ids and isinstance(found.get("tool_call_id"), str):
        found["tool_call_id"] = _short_id(found["tool_call_id"])
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _call(call: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    found, function = dict(call), call.get("function")
    if isinstance(function, Mapping):
        arguments = function.get("arguments")
        known = {**function, "arguments": _arguments(arguments, style.arguments_as_text)}
        known.pop("parsed_arguments", None)  # of openai's helpers; some templates write all that is there
        found["function"] = known
    if style.short_ids and isinstance(found.get("id"), str):
        found["id"] = _short_id(found["id"])
    return found


def _arguments(given: Any, as_text: bool) -> Any:
    """In the form that the template wants; what is no JSON object stays as it is."""
    given = {} if given is None else given
    if as_text:
        return json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given


def _short_id(call_id: str) -> str:
    """The same for the call and for its result."""
    if len(call_id) == SHORT_ID_LENGTH and call_id.isalnum() and call_id.isascii():
        return call_id
    return sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_LENGTH]
