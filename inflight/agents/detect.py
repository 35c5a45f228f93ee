"""Which formats a checkpoint has, by its own chat template.

A template writes the calls of earlier turns just as the model is to write new ones. So a call is rendered, and the
format whose parser reads exactly that call is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from inflight.agents.formats.base import HARMONY_REASONING, THINKING, TOOL_FORMATS
from inflight.agents.parser import MessageParser
from inflight.agents.values import parsed_json
from inflight.errors import RequestError, TemplateError
from inflight.text import ChatTemplate, Tokenizer

_NAME = "count_zebras"
_ARGUMENTS = {"park": "Etosha", "days": 7}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Counts the zebras of a park.",
        "parameters": {
            "type": "object",
            "properties": {
                "park": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How long to look."},
            },
            "required": ["park", "days"],
        },
    },
}
_QUESTION = {"role": "user", "content": "How many zebras are there?"}
_ARGUMENT_FORMS: tuple[Any, ...] = (_ARGUMENTS, json.dumps(_ARGUMENTS))
_IDS = (f"functions.{_NAME}:0", "a1B2c3D4e")


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template wants the calls of earlier turns: templates differ in what they take."""

    arguments_as_text: bool = False  # else as an object
    empty_content: str | None = None  # of a message that only calls
    short_ids: bool = False  # nine letters or digits


_STYLES = tuple(
    CallStyle(as_text, content, short_ids)
    for as_text, content, short_ids in product((False, True), (None, ""), (False, True))
)


@dataclass(frozen=True, slots=True)
class DetectedCalls:
    """How a checkpoint writes and reads calls, by its template."""

    tool_format: str  # its name, for `TOOL_FORMATS`
    style: CallStyle


def detect_calls(template: ChatTemplate, reasoning_format: str | None = None) -> DetectedCalls | None:
    """None where the template does not tell. Raises only if templates cannot be rendered at the moment."""
    try:
        renderings = list(_rendered_calls(template))
    except RequestError:  # it takes no tools, or no messages at all
        return None
    for (style, text), name in product(renderings, TOOL_FORMATS):
        message = MessageParser(name, reasoning_format, tools=[_TOOL]).parse(text)
        if [call.name for call in message.tool_calls] != [_NAME]:
            continue
        if parsed_json(message.tool_calls[0].arguments) == _ARGUMENTS:
            return DetectedCalls(name, style)
    return None


def detect_tool_format(template: ChatTemplate, reasoning_format: str | None = None) -> str | None:
    """The name of the tool format alone."""
    found = detect_calls(template, reasoning_format)
    return None if found is None else found.tool_format


def shows_tools(template: ChatTemplate) -> bool:
    """Whether the model gets to see tools at all: some templates leave them out, or refuse them."""
    for messages in ([_QUESTION], [{"role": "system", "content": "Be brief."}, _QUESTION]):
        try:
            if _NAME in template.render(messages, tools=[_TOOL]):
                return True
        except RequestError:
            continue
    return False


def detect_reasoning_format(template: ChatTemplate, tokenizer: Tokenizer | None = None) -> str | None:
    """The name of the reasoning format, one of `REASONING_FORMATS`; None where there is none. Never raises.

    Templates take the reasoning of earlier turns out, or begin that of the next, and so name its markers. Where one
    does not, the vocabulary may: nobody else has a token for them.
    """
    if template.mentions("<|channel|>") and template.mentions("analysis"):
        return HARMONY_REASONING
    for name, markers in THINKING.items():
        if template.mentions(markers.close):
            return name
    for name, markers in THINKING.items():
        ids = [tokenizer and tokenizer.token_id(text) for text in (markers.open, markers.close)]
        if None not in ids:
            return name
    return None


def opens_reasoning(template: ChatTemplate, reasoning_format: str | None) -> bool:
    """Whether prompts begin the reasoning where it is asked for, so that one that does not asks for none. Never
    raises."""
    markers, switched_on = THINKING.get(reasoning_format or ""), template.effort_kwargs("high")
    if markers is None or not switched_on:
        return False
    try:
        return bool(markers.opened(template.render([_QUESTION], kwargs=switched_on)))
    except TemplateError:
        return False


def _rendered_calls(template: ChatTemplate) -> Iterator[tuple[CallStyle, str]]:
    """What the model would have written, by the styles that the template takes."""
    tools = [_TOOL]
    asked = template.render([_QUESTION], tools=tools, add_generation_prompt=False)
    prompt = template.render([_QUESTION], tools=tools)
    for style in _STYLES:
        function = {"name": _NAME, "arguments": _ARGUMENT_FORMS[style.arguments_as_text]}
        call = {"id": _IDS[style.short_ids], "type": "function", "function": function}
        message = {"role": "assistant", "content": style.empty_content, "tool_calls": [call]}
        try:
            text = template.render([_QUESTION, message], tools=tools, add_generation_prompt=False)
        except TemplateError:
            continue
        # A prompt may end with what only some answers begin with, such as a block of reasoning.
        if text.startswith(prompt):
            yield style, text[len(prompt) :]
        differing = (at for at, pair in enumerate(zip(asked, text, strict=False)) if pair[0] != pair[1])
        yield style, text[next(differing, min(len(asked), len(text))) :]
