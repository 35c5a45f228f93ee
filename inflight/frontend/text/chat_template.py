"""A checkpoint's chat template: its files, the messages that it accepts, and its rendering.

A template is a program from a checkpoint. It runs in a child process (`render_worker.py`), within limits of time,
memory and output size.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.checkpoint.files import read_object, read_text
from inflight.errors import (
    ConfigError,
    ModelError,
    PromptError,
    QueueFullError,
    TemplateError,
    TemplateWorkerError,
    shown,
)
from inflight.frontend.text import render_worker
from inflight.processes.sandbox import SandboxPool, SandboxWorker
from inflight.processes.sandbox_worker import pack

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

_TEMPLATE_FOLDER = "additional_chat_templates"

ChatTemplateSource = str | dict[str, str]  # one template, or several by name
Message = Mapping[str, Any]
Scalar = str | int | float | bool | None


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
        raise _invalid(f"messages is a {type(messages).__name__}: it must be a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise _invalid(f"there are {len(messages)} messages: there must be 1 to {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise _invalid(f"{name} is a {type(message).__name__}: it must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    _check_calls(f"{name}.tool_calls", message.get("tool_calls"))
    if not isinstance(role, str) or not role:
        raise _invalid(f"{name}.role is {shown(role)}: it must be a non-empty string")
    if content is None and role == "assistant":  # it only calls tools, or only has reasoning
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _invalid(
            f"{name}.content is of type {type(content).__name__}: it must be a string or a list of text parts"
        )
    for index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if part_type != "text":
            raise _invalid(
                f'{name}.content[{index}] is of type {shown(part_type)}: only "text" parts are allowed'
            )
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{name}.content[{index}].text must be a string")


def _check_calls(name: str, calls: object) -> None:
    """Check the calls of an earlier turn, which templates write out again."""
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise _invalid(f"{name} is of type {type(calls).__name__}: it must be a list")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(f"{name}[{index}] is {shown(call)}: it must have a function with a name")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise _invalid(
                f"{name}[{index}].function.arguments is {shown(function['arguments'])}: "
                "it must be JSON text or an object"
            )


def _invalid(problem: str) -> PromptError:
    return PromptError(problem, param="messages")


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


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of one rendering."""

    seconds: float = 2.0
    memory: int = 512 << 20  # bytes of the worker's address space, if the system enforces it
    max_characters: int = 16 << 20  # of the output
    max_input_bytes: int = 16 << 20  # of messages, tools and template, as JSON
    max_workers: int = 4  # concurrent processes, started when needed


class Renderer:
    """Thread-safe renderer. A worker that exceeds a limit is killed and replaced by a fresh one."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        memory = self.limits.memory
        self._pool = SandboxPool(lambda: _start_worker(memory))  # which must not keep this object alive
        self._renew_slots()

    def _renew_slots(self) -> None:
        self._process = os.getpid()
        self._slots = threading.BoundedSemaphore(self.limits.max_workers)

    def close(self) -> None:
        """Stop the idle workers; a later rendering starts a new one."""
        self._pool.close()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        limits = self.limits
        request = self._request(source, variables)
        if os.getpid() != self._process:  # threads of the process that forked this one may have had the slots
            self._renew_slots()
        if not self._slots.acquire(timeout=limits.seconds):
            raise QueueFullError(
                f"all {limits.max_workers} chat template workers were busy for {limits.seconds:g} seconds: "
                "try again later"
            )
        try:
            reply = self._call(request)
        finally:
            self._slots.release()
        if "rejected" in reply:
            raise TemplateError(f"the chat template rejects these messages: {reply['rejected']}")
        if "error" in reply:
            raise TemplateError(f"the chat template failed: {reply['error']}")
        text: str = reply["text"]
        return text

    def _request(self, source: str, variables: Mapping[str, Any]) -> bytes:
        limits = self.limits
        content = {
            "source": source,
            "variables": variables,
            "max_characters": limits.max_characters,
            "seconds": limits.seconds + 1,  # the worker's own alarm only matters if its parent is gone
        }
        try:
            request = pack(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"the messages, tools or template arguments are not JSON data: {error}"
            ) from error
        if len(request) > limits.max_input_bytes:
            raise PromptError(
                f"the messages, tools and template have {len(request)} bytes as JSON: "
                f"at most {limits.max_input_bytes} are allowed"
            )
        return request

    def _call(self, request: bytes) -> dict[str, str]:
        worker = self._pool.take()
        try:
            try:
                worker.wait_until_ready()
            except (OSError, EOFError) as error:
                raise TemplateWorkerError(
                    f"the chat template worker exited during startup: {error!r}"
                ) from error
            reply: dict[str, str]
            reply, _ = worker.call(request, self.limits.seconds)
            if "exhausted" in reply:
                worker.interrupt()
        except TimeoutError:
            return {"error": f"it ran longer than the limit of {self.limits.seconds:g} seconds"}
        except (OSError, EOFError) as error:  # probably not caused by the messages
            raise TemplateWorkerError("the process that renders the chat template died") from error
        finally:
            self._pool.put_back(worker)
        return reply


def _start_worker(memory: int) -> SandboxWorker:
    try:
        return SandboxWorker(render_worker.__file__, memory)
    except OSError as error:
        raise TemplateWorkerError(f"the chat template worker cannot be started: {error}") from error


def read_template_option(option: str) -> str:
    """Return the template of the `chat_template` option, which is its text or the path of a file."""
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"chat_template is {shown(option, 200)}: it must be a template or the path of a template file ({why})"
        ) from error


def read_chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplateSource | None:
    """Return the checkpoint's template or templates. Separate files override tokenizer_config.json."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    for entry in inline if isinstance(inline, list) else ():
        if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
            raise ModelError(
                f"chat_template in tokenizer_config.json has the entry {shown(entry)}: it must have name and template"
            )
        templates[str(entry["name"])] = str(entry["template"])
    older = (read_object(folder, "chat_template.json") or {}).get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    names = ["chat_template.jinja"]
    names += sorted(f"{_TEMPLATE_FOLDER}/{path.name}" for path in (folder / _TEMPLATE_FOLDER).glob("*.jinja"))
    for name in names:
        source = read_text(folder, name)
        if source is not None:
            templates["default" if name == "chat_template.jinja" else Path(name).stem] = source
    if not templates:
        return None
    return templates["default"] if list(templates) == ["default"] else templates
