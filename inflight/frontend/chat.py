"""Chat requests: checks of messages and tools, the shape that templates read, and the formats of a checkpoint."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypedDict, Unpack

from inflight.config import ModelConfig
from inflight.errors import ParameterError, clipped, shown
from inflight.frontend.agents.answer_grammar import NamedTool, ToolChoice
from inflight.frontend.agents.detect import (
    CallStyle,
    call_marker_ids,
    detect_calls,
    detect_reasoning_format,
    opens_reasoning,
    shows_tools,
)
from inflight.frontend.agents.formats.base import REASONING_MARKERS, reasoning_format_name, tool_format_name
from inflight.frontend.agents.grammar_writer import INPUT_GRAMMAR
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.text.chat_template import ChatTemplate
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

NONE = "none"  # disables a parser
MAX_TOOLS = 512
MAX_NAME_LENGTH = 256
SHORT_ID_LENGTH = 9
# Fields that clients (openai's helpers, litellm) add to an answer and send back with it. The model must not see them.
CLIENT_FIELDS = frozenset({"parsed", "provider_specific_fields", "annotations", "refusal", "audio"})
_TOOL_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME_LENGTH}}}", re.ASCII)


class ChatOptions(TypedDict, total=False):
    """The arguments of `chat` besides the messages, as in OpenAI's API."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: ToolChoice | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str | None  # for templates that support it; "none" disables reasoning
    max_reasoning_tokens: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None  # None: unless the final message is continued
    continue_final_message: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages and tools in the shape of OpenAI's chat API.

    Content may be text, text parts or missing; arguments of tool calls may be JSON text or objects.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None  # for templates that support it; "none" disables reasoning
    max_reasoning_tokens: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        budget = self.max_reasoning_tokens
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise ParameterError.of_value(
                "max_reasoning_tokens", budget, "it must be an integer of at least 0"
            )
        if not isinstance(self.reasoning_effort, str | None):
            raise ParameterError.of_value("reasoning_effort", self.reasoning_effort, "it must be a string")

    @classmethod
    def from_messages(cls, messages: Sequence[Any], **options: Unpack[ChatOptions]) -> ChatRequest:
        """Make a request from the arguments of `chat`. Raises ParameterError."""
        fields: dict[str, Any] = dict(options)
        tools, choice = selected_tools(
            checked_tools(fields.pop("tools", None)), fields.pop("tool_choice", "auto")
        )
        if fields.get("add_generation_prompt") is None:
            fields["add_generation_prompt"] = not fields.get("continue_final_message")
        template_kwargs = fields.pop("chat_template_kwargs", None) or {}
        return cls(_dumped(messages), tools, choice, template_kwargs=template_kwargs, **fields)

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees."""
        return () if self.tool_choice == "none" else self.tools


def _dumped(messages: Any) -> Any:
    """Return messages as dicts; they may be objects of a client library, such as a message of openai's."""
    if not isinstance(messages, list | tuple):
        return messages
    return [message.model_dump() if hasattr(message, "model_dump") else message for message in messages]


def selected_tools(
    tools: Sequence[Mapping[str, Any]], choice: Any
) -> tuple[Sequence[Mapping[str, Any]], ToolChoice]:
    """Return the tools that a request's tool_choice allows, and its choice among them. Raises ParameterError."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, _tool_choice(choice)
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    chosen = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(chosen, list):
        raise _invalid(
            "tool_choice",
            f"tool_choice.allowed_tools is {shown(allowed)}: it must have a mode, which is auto or required, and tools",
        )
    names = {_tool_choice(tool) for tool in chosen}
    unknown = names - {NamedTool(tool["function"]["name"]) for tool in tools}
    if unknown:
        texts = sorted(tool.name if isinstance(tool, NamedTool) else tool for tool in unknown)
        raise _invalid(
            "tool_choice", f"tool_choice allows {clipped(', '.join(texts), 200)}: no tool has this name"
        )
    return [tool for tool in tools if NamedTool(tool["function"]["name"]) in names], mode


def _tool_choice(choice: Any) -> ToolChoice:
    """Parse a request's tool_choice: a word, or an object that names a function."""
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    if choice == "required":
        return "required"
    if isinstance(choice, NamedTool):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return NamedTool(name)
    raise _invalid(
        "tool_choice",
        f"tool_choice is {shown(choice)}: it must be none, auto, required, allowed_tools, or name a function: "
        '{"type": "function", "function": {"name": ...}}',
    )


def checked_tools(items: Any) -> list[dict[str, Any]]:
    """Return a request's tools without their null fields. Raises ParameterError."""
    if items is None:
        return []
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise _invalid("tools", f"tools is {shown(items)}: it must be a list of tools")
    if len(items) > MAX_TOOLS:
        raise _invalid("tools", f"tools has {len(items)} items: at most {MAX_TOOLS} are allowed")
    tools = [_checked_tool(f"tools[{index}]", tool) for index, tool in enumerate(items)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _invalid(
                "tools", f"tools[{index}].function.name is {name!r}: another tool already has this name"
            )
    return tools


def num_characters(value: Any) -> int:
    """Count the characters of everything that a template may put into the prompt, not only of message contents.

    A number counts as one character, whatever its digits.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, (*value, *value.values())))
    return sum(map(num_characters, value)) if isinstance(value, list) else 1


def _checked_tool(where: str, tool: Any) -> dict[str, Any]:
    tool_type = tool.get("type") if isinstance(tool, Mapping) else None
    if tool_type != "function":
        raise _invalid("tools", f"{where} is {shown(tool)}: only tools of type function are supported", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _invalid("tools", f"{where}.function is {shown(function)}: it must be an object", where)
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise _invalid(
            "tools",
            f"{where}.function.name is {shown(name)}: it must have 1 to {MAX_NAME_LENGTH} letters, digits or "
            "any of _.:/-",
            where,
        )
    fields = {key: value for key, value in function.items() if value is not None}
    for key, type_, words in (
        ("description", str, "a text"),
        ("parameters", Mapping, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if key in fields and not isinstance(fields[key], type_):
            raise _invalid(
                "tools", f"{where}.function.{key} is {shown(fields[key])}: it must be {words}", where
            )
    return {**tool, "function": fields}


def _invalid(param: str, message: str, where: str | None = None) -> ParameterError:
    return ParameterError(message, param=where or param, code="invalid_value")


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as a template reads them: with a schema, and without the fields that only constrain the answer."""
    return [{**tool, "function": _shown_function(tool["function"])} for tool in tools]


def _shown_function(function: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in function.items() if key not in ("strict", INPUT_GRAMMAR)}
    fields.setdefault("parameters", {"type": "object", "properties": {}})
    return fields


def template_messages(messages: Sequence[Any], style: CallStyle) -> list[Any]:
    """Return messages as a template reads them. Items that are not messages are left for `check_messages`."""
    return [_message(message, style) if isinstance(message, Mapping) else message for message in messages]


def _message(message: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    fields = {
        name: value for name, value in message.items() if value is not None and name not in CLIENT_FIELDS
    }
    reasoning = fields.pop("reasoning", None)
    if isinstance(reasoning, str):
        fields.setdefault("reasoning_content", reasoning)
    content = fields.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        # Not every template can read parts.
        fields["content"] = "".join(part["text"] for part in content)
    elif content is None and fields.get("role") == "assistant":
        fields["content"] = style.empty_content
    if style.thinking:
        _name_thinking(fields)
    calls = fields.get("tool_calls")
    if isinstance(calls, list | tuple):
        fields["tool_calls"] = [_call(call, style) if isinstance(call, Mapping) else call for call in calls]
    if style.short_ids and isinstance(fields.get("tool_call_id"), str):
        fields["tool_call_id"] = _short_id(fields["tool_call_id"])
    return fields


def _name_thinking(fields: dict[str, Any]) -> None:
    """Name the reasoning as the template does. With calls, what the message says besides becomes part of it."""
    texts = [fields.pop("reasoning_content", None)]
    if fields.get("tool_calls"):
        texts.append(fields.pop("content", None))
    present = [text for text in texts if isinstance(text, str) and text]
    if present:
        fields.setdefault("thinking", "\n".join(present))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _call(call: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    fields, function = dict(call), call.get("function")
    if isinstance(function, Mapping):
        arguments = _arguments(function.get("arguments"), style.arguments_as_text)
        fields["function"] = {**function, "arguments": arguments}
        # openai's helpers add this, and some templates write every field of a function.
        fields["function"].pop("parsed_arguments", None)
    if style.short_ids and isinstance(fields.get("id"), str):
        fields["id"] = _short_id(fields["id"])
    return fields


def _arguments(arguments: Any, as_text: bool) -> Any:
    """Return a call's arguments as the template reads them, or unchanged if they are not a JSON object."""
    arguments = {} if arguments is None else arguments
    if as_text:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _short_id(call_id: str) -> str:
    """Return a short id, the same for a call and its result: some templates accept no other length."""
    if len(call_id) == SHORT_ID_LENGTH and call_id.isalnum() and call_id.isascii():
        return call_id
    return sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_LENGTH]


# ---- formats of a checkpoint ----


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How a checkpoint writes tool calls and reasoning: as configured, or as its chat template shows."""

    tools: str | None  # name of the tool call format; None: not known
    reasoning: str | None
    style: CallStyle
    shows_tools: bool  # the template writes tools into the prompt
    opens_reasoning: bool  # with reasoning enabled, the prompt already opens it
    call_marker_ids: frozenset[int] = frozenset()  # tokens that start a call

    @classmethod
    def from_config(
        cls, config: ModelConfig, template: ChatTemplate, tokenizer: Tokenizer | None
    ) -> ChatFormats:
        """Detect the formats. This renders the template several times: too slow for an event loop."""
        reasoning = reasoning_format_name(_forced(config.reasoning_parser))
        if config.reasoning_parser is None:
            reasoning = detect_reasoning_format(template, tokenizer)
        calls = detect_calls(template, reasoning)
        tools = tool_format_name(_forced(config.tool_call_parser))
        if config.tool_call_parser is None and calls is not None:
            tools = calls.tool_format
        style = CallStyle() if calls is None else calls.style
        logger.info("tool call parser: %s, reasoning parser: %s", tools or NONE, reasoning or NONE)
        shows = calls is not None or shows_tools(template)
        markers = call_marker_ids(tools, tokenizer)
        return cls(tools, reasoning, style, shows, opens_reasoning(template, reasoning), markers)

    def forbidden_ids(self, chat: ChatRequest, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that an answer must not contain: a model that is offered no tools starts no call.

        Tokens that the request itself names are not forbidden, and neither is anything that its constraint allows.
        """
        if chat.offered_tools or params.structured_outputs is not None:
            return frozenset()
        return self.call_marker_ids - {*(params.logit_bias or ()), *(params.allowed_token_ids or ())}

    def reasoning_after(self, prompt: str) -> str | None:
        """Return the format of the reasoning that the answer to this prompt may start with."""
        enabled = not self.opens_reasoning or REASONING_MARKERS[self.reasoning or ""].opened_by(prompt)
        return self.reasoning if enabled else None


def check_parsers(config: ModelConfig) -> None:
    """Raise ConfigError if a configured parser does not exist."""
    MessageParser(_forced(config.tool_call_parser), _forced(config.reasoning_parser))


def _forced(name: str | None) -> str | None:
    return None if name == NONE else name
