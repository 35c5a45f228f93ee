"""Chat messages to a prompt, using the checkpoint's chat template.

Special tokens come only from the template: text in a message that spells one stays text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.errors import PromptError, TemplateError, shown
from inflight.text.render import Renderer, RenderLimits
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import ChatTemplateSource

MAX_MESSAGES = 8192

# Template arguments that a request may set. Any other name could shadow a variable that the template trusts.
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

# Template functions that may join separate parts of a text.
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
    """Return the prompt's text and its token ids. `check_size` gets the number of characters before tokenizing."""
    check_messages(messages)

    def escape_inputs(escaper: SpecialTokenEscaper) -> dict[str, Any]:
        return {
            "messages": [escaper.escape(escaper.join_parts(message)) for message in messages],
            "tools": escaper.escape(tools),
            "kwargs": escaper.escape(kwargs),
        }

    flags: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    escaper = SpecialTokenEscaper(tokenizer)
    text = template.render(**escape_inputs(escaper), **flags)
    if template.may_join_text:
        careful = SpecialTokenEscaper(tokenizer, escape_first_characters=True)
        inputs = escape_inputs(careful)
        if careful.num_escaped > escaper.num_escaped:
            second = template.render(**inputs, **flags)
            if careful.specials_in(second) != escaper.specials_in(text):
                return careful.encode(second, check_size)
    return escaper.encode(text, check_size)


class ChatTemplate:
    """A checkpoint's chat template, or its templates by name. Rendering is thread-safe."""

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
        """Return whether there is a template at all."""
        return bool(self._sources)

    @property
    def may_join_text(self) -> bool:
        """Whether rendering may join separate parts of a text."""
        return any(_JOINING.search(source) for source in self._sources.values())

    def mentions(self, text: str) -> bool:
        """Return whether a template contains this text."""
        return any(text in source for source in self._sources.values())

    def effort_kwargs(self, effort: str | None) -> dict[str, Scalar]:
        """Return the template's own arguments for a reasoning effort, if it has any; "none" turns reasoning off."""
        if effort is None:
            return {}
        kwargs: dict[str, Scalar] = {}
        if self.mentions("reasoning_effort"):
            kwargs["reasoning_effort"] = effort
        for name in ("enable_thinking", "thinking"):
            if self._uses_variable(name):
                kwargs[name] = effort != "none"
        return kwargs

    def _uses_variable(self, name: str) -> bool:
        """Return whether a template uses this variable, rather than an attribute, a string or a longer name."""
        pattern = re.compile(rf"(?<![\w.'\"]){name}\b")
        return any(pattern.search(source) for source in self._sources.values())

    def close(self) -> None:
        """Stop the worker processes now rather than at exit."""
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
        """Return the prompt's text. It includes any BOS token: encode it with `add_special_tokens=False`."""
        check_messages(messages)
        self._check_kwargs(kwargs or {})
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "add_generation_prompt and continue_final_message are both true: only one of them may be true"
            )
        marker = ""
        if continue_final_message:
            # A word that no message contains, and a space that shows whether the template trims messages.
            marker = f"continue{secrets.token_hex(8)} "
            messages = [*messages[:-1], _append_marker(messages[-1], marker)]
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
        return _cut_at_marker(text, marker) if marker else text

    def _source(self, with_tools: bool) -> str:
        if not self._sources:
            raise TemplateError(
                "this model has no chat template (looked in tokenizer_config.json, chat_template.jinja and "
                "chat_template.json): send a prompt instead of messages, or start with --chat-template FILE"
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
                raise TemplateError(
                    f"the template argument {name!r} is not allowed: it must be one of {allowed}"
                )
            if value is not None and not isinstance(value, str | int | float | bool):
                raise TemplateError(
                    f"the template argument {name!r} is a {type(value).__name__}: "
                    "it must be a string, a number, a boolean or null"
                )


def check_messages(messages: object) -> None:
    """Raise PromptError unless these are messages that a text model can process."""
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
    if content is None and role == "assistant":  # it only calls tools, or only has reasoning
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
    """Check the calls of an earlier turn, which templates write out again."""
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
                f"{name}[{index}].function.arguments is {shown(function['arguments'])}: "
                "it must be JSON text or an object",
                param="messages",
            )


def _append_marker(message: Message, marker: str) -> Message:
    """Return the message with the marker appended to its last text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + marker}
    if not content:
        raise PromptError("continue_final_message is true, but the final message has no content to continue")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]}


def _cut_at_marker(text: str, marker: str) -> str:
    end = text.rfind(marker.rstrip())
    if end < 0:
        raise TemplateError("the final message cannot be continued: the chat template omits it")
    before = text[:end]
    return before if text.startswith(marker, end) else before.rstrip()


class SpecialTokenEscaper:
    """Replaces spellings of special tokens with placeholders: random words that no message contains.

    A message may spell a special token: `<|im_end|>` in a user's text would end the user's turn. Such spellings are
    replaced before the template sees them, and are tokenized as plain text afterwards. The same happens to pieces of
    them at the ends of any string, because the template may put the missing piece next to it, and to spellings in other
    case, because the template may lowercase them. Messages without any of these, which is nearly all, are tokenized in
    one piece and have the ids that the checkpoint was trained on.

    A template that removes something from a text may join what was on both sides of it. Then `encode_chat` renders the
    prompt a second time, with placeholders for every character that can start a special token, to see whether it did.
    """

    def __init__(self, tokenizer: Tokenizer, escape_first_characters: bool = False) -> None:
        """Create an escaper. With `escape_first_characters`, nothing that remains can become a special token."""
        self._tokenizer = tokenizer
        spellings = tokenizer.special_spellings
        self._longest_piece = len(spellings[0]) - 1 if spellings else 0
        first = {text[0] for text in spellings if not text[0].isalnum()} if escape_first_characters else ()
        escaped = [*spellings, *first]
        self._pattern = re.compile("|".join(map(re.escape, escaped)), re.IGNORECASE) if spellings else None
        self._word = f"mark{secrets.token_hex(8)}x"
        self._escaped: list[str] = []

    @property
    def num_escaped(self) -> int:
        return len(self._escaped)

    def join_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge the parts of a message's content if their combined text spells a special token."""
        content = message.get("content")
        if self._pattern is None or not isinstance(content, list):
            return message
        text = "".join(part["text"] for part in content)
        if not self._pattern.search(text):
            return message
        return {**message, "content": [{"type": "text", "text": text}]}

    def escape(self, value: Any) -> Any:
        """Return a message, tool or argument, or any part of one, with placeholders in its strings."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._escape_pieces(
                self._pattern.sub(lambda match: self._placeholder(match.group()), value)
            )
        if isinstance(value, Mapping):  # keys too: the parameters of a tool are written out
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list | tuple) else value

    def _escape_pieces(self, text: str) -> str:
        """Replace pieces of special tokens at both ends of a text, ignoring white space, which may be trimmed.

        `<|im_` and the `end|>` of another field would form a special token if a template puts the two side by side, and
        so would `|im_end|` if it adds angle brackets.
        """
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if 0 < end - start <= self._longest_piece and self._is_inner_piece(text[start:end]):
            return text[:start] + self._placeholder(text[start:end]) + text[end:]
        for length in range(min(self._longest_piece, end - start), 0, -1):
            if text[end - length : end].lower() in self._tokenizer.special_prefixes:
                text = text[: end - length] + self._placeholder(text[end - length : end]) + text[end:]
                break
        for length in range(min(self._longest_piece, end - start), 1, -1):
            if text[start : start + length].lower() in self._tokenizer.special_suffixes:
                piece = text[start : start + length]
                return text[:start] + self._placeholder(piece) + text[start + length :]
        return text

    def _is_inner_piece(self, text: str) -> bool:
        """Return whether a text is a piece of a special token but not a plain word, which templates may compare."""
        return not text.isidentifier() and any(
            text.lower() in spelling.lower() for spelling in self._tokenizer.special_spellings
        )

    def _placeholder(self, text: str) -> str:
        self._escaped.append(text)
        return f"{self._word}{len(self._escaped) - 1}z"

    def specials_in(self, text: str) -> list[str]:
        """Return the special tokens of a rendered text."""
        spellings = map(re.escape, self._tokenizer.special_spellings)
        return re.findall("|".join(spellings) or "(?!)", text)

    def encode(self, text: str, check_size: Callable[[int], None] | None = None) -> tuple[str, list[int]]:
        """Return the rendered text with its original spellings, and its token ids.

        `check_size` gets the number of characters before they are tokenized, and raises if there are too many.
        """
        tokenizer = self._tokenizer
        if not self._escaped:
            if check_size is not None:
                check_size(len(text))
            return text, tokenizer.encode(text, add_special_tokens=False)
        # Text, number, text, ... A template may change a placeholder's case, or cut it so that any number follows.
        parts = re.split(f"{self._word}([0-9]{{1,9}})z", text, flags=re.IGNORECASE)
        parts[1::2] = [self._escaped[int(n)] if int(n) < self.num_escaped else "" for n in parts[1::2]]
        if check_size is not None:
            check_size(sum(map(len, parts)))
        # Tokenize each distinct text once: there may be a hundred thousand occurrences of a few.
        texts, spelled = dict.fromkeys(parts[::2]), dict.fromkeys(parts[1::2])
        ids_by_text = (
            dict(zip(texts, tokenizer.encode_batch([*texts], False), strict=True)),
            dict(zip(spelled, tokenizer.encode_batch([*spelled], False, parse_special=False), strict=True)),
        )
        ids = [token_id for index, part in enumerate(parts) for token_id in ids_by_text[index % 2][part]]
        return "".join(parts), ids
