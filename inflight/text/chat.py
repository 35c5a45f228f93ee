"""Messages to a prompt, by the chat template of the checkpoint, with special tokens from nowhere but the template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.errors import PromptError, TemplateError, shown
from inflight.text.files import ChatTemplateSource
from inflight.text.marks import Marks
from inflight.text.render import Renderer, RenderLimits
from inflight.text.tokenizer import Tokenizer

MAX_MESSAGES = 8192

# Arguments of known templates that a request may set. Any other name could shadow what the template trusts.
TEMPLATE_KWARGS = frozenset(
    {
        "add_vision_id",
        "custom_instructions",
        "date_string",
        "enable_thinking",
        "keep_past_thinking",
        "model_identity",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tools_in_user_message",
    }
)

# What may put together parts of a text that were apart.
_JOINING = re.compile(r"\b(replace|join|reverse|striptags)\b")

Message = Mapping[str, Any]
Scalar = str | int | float | bool | None


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Scalar] | None = None,
    check_size: Callable[[int], None] | None = None,
) -> tuple[str, list[int]]:
    """The prompt's text and its token ids. `check_size` gets the number of its characters before they are tokenized."""
    check_messages(messages)

    def hidden(marks: Marks) -> dict[str, Any]:
        return {
            "messages": [marks.hide(marks.join_parts(message)) for message in messages],
            "tools": marks.hide(tools),
            "kwargs": marks.hide(kwargs),
        }

    flags: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    marks = Marks(tokenizer)
    text = template.render(**hidden(marks), **flags)
    if template.joins:
        careful = Marks(tokenizer, hide_first_characters=True)
        given = hidden(careful)
        if careful.num_hidden > marks.num_hidden:
            second = template.render(**given, **flags)
            if careful.specials_in(second) != marks.specials_in(text):
                return careful.encode(second, check_size)
    return marks.encode(text, check_size)


class ChatTemplate:
    """A checkpoint's chat template, or its templates by name. Any thread may render."""

    def __init__(
        self,
        source: ChatTemplateSource | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        allowed_kwargs: frozenset[str] = TEMPLATE_KWARGS,
        limits: RenderLimits | None = None,
    ) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens or {})
        self._allowed_kwargs = allowed_kwargs
        self._renderer = Renderer(limits)

    def __bool__(self) -> bool:
        """Whether there is a template at all."""
        return bool(self._sources)

    @property
    def joins(self) -> bool:
        """Whether it may make one text of two."""
        return any(_JOINING.search(source) for source in self._sources.values())

    def mentions(self, text: str) -> bool:
        """Whether a template spells this."""
        return any(text in source for source in self._sources.values())

    def effort_kwargs(self, effort: str | None) -> dict[str, Scalar]:
        """The template's own arguments for so much reasoning, as far as it has any; "none" switches it off."""
        if effort is None:
            return {}
        found: dict[str, Scalar] = {}
        if self.mentions("reasoning_effort"):
            found["reasoning_effort"] = effort
        for name in ("enable_thinking", "thinking"):
            if self._reads(name):
                found[name] = effort != "none"
        return found

    def _reads(self, name: str) -> bool:
        """Whether this word, which is no part of another or of a message, is in a template."""
        pattern = re.compile(rf"(?<![\w.'\"]){name}\b")
        return any(pattern.search(source) for source in self._sources.values())

    def close(self) -> None:
        """End the worker processes now rather than with the program."""
        self._renderer.close()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Scalar] | None = None,
    ) -> str:
        """The prompt's text. It holds its own BOS token: encode it with `add_special_tokens=False`."""
        check_messages(messages)
        self._check_kwargs(kwargs or {})
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "add_generation_prompt and continue_final_message are both true: "
                "a reply is either begun or continued"
            )
        marker = ""
        if continue_final_message:
            # A word that no message holds, and a space that tells whether the template trims messages.
            marker = f"continue{secrets.token_hex(8)} "
            messages = [*messages[:-1], _marked(messages[-1], marker)]
        text = self._renderer.render(
            self._source(bool(tools)),
            {
                **self._special_tokens,
                "messages": messages,
                "tools": tools or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **(kwargs or {}),
            },
        )
        return _cut(text, marker) if marker else text

    def _source(self, with_tools: bool) -> str:
        if not self._sources:
            raise TemplateError(
                "this model has no chat template: none of tokenizer_config.json, chat_template.jinja and "
                "chat_template.json has one; give a prompt instead of messages, or start with --chat-template FILE"
            )
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self._sources:
                return self._sources[name]
        raise TemplateError(
            f"this model has no default chat template, only {', '.join(sorted(self._sources))}"
        )

    def _check_kwargs(self, kwargs: Mapping[str, object]) -> None:
        for name, value in kwargs.items():
            if name not in self._allowed_kwargs:
                allowed = ", ".join(sorted(self._allowed_kwargs))
                raise TemplateError(f"the template argument {name!r} is not allowed: allowed are {allowed}")
            if value is not None and not isinstance(value, str | int | float | bool):
                raise TemplateError(
                    f"the template argument {name!r} is a {type(value).__name__}: "
                    "it must be a string, a number, a boolean or null"
                )


def check_messages(messages: object) -> None:
    """Raise PromptError unless these are messages that a text model can read."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise PromptError(
            f"messages is a {type(messages).__name__}: it must be a list of messages", param="messages"
        )
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise PromptError(
            f"there are {len(messages)} messages: there must be 1 to {MAX_MESSAGES}", param="messages"
        )
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{name} is a {type(message).__name__}: it must be an object with role and content",
            param="messages",
        )
    role, content = message.get("role"), message.get("content")
    _check_calls(f"{name}.tool_calls", message.get("tool_calls"))
    if not isinstance(role, str) or not role:
        raise PromptError(f"{name}.role is {shown(role)}: it must be a non-empty string", param="messages")
    if content is None and role == "assistant":  # only calls tools, or only thinks
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise PromptError(
            f"{name}.content is of type {type(content).__name__}: it must be a string or a list of text parts",
            param="messages",
        )
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise PromptError(
                f'{name}.content[{index}] is of type {shown(kind)}: only "text" parts are allowed',
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{name}.content[{index}].text must be a string", param="messages")


def _check_calls(name: str, calls: object) -> None:
    """The calls of an earlier turn, which templates write out anew."""
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise PromptError(f"{name} is of type {type(calls).__name__}: it must be a list", param="messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(
                f"{name}[{index}] is {shown(call)}: it must have a function with a name", param="messages"
            )
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise PromptError(
                f"{name}[{index}].function.arguments is {shown(function['arguments'])}: it must be JSON text",
                param="messages",
            )


def _marked(message: Message, marker: str) -> Message:
    """The message with the marker after its last text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + marker}
    if not content:
        raise PromptError("continue_final_message is true, but the final message has no content to continue")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]}


def _cut(text: str, marker: str) -> str:
    end = text.rfind(marker.rstrip())
    if end < 0:
        raise TemplateError("the final message cannot be continued: the chat template leaves it out")
    before = text[:end]
    return before if text.startswith(marker, end) else before.rstrip()
