"""Detection of a checkpoint's formats from its chat template.

A template writes the calls of earlier turns just as the model should write new ones. So detection renders a call, and
the format whose parser reads exactly that call is the model's. Of the styles in which it can be rendered, the one is
chosen in which the template also renders a whole conversation, without words such as "None" for missing content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from inflight.errors import RequestError, TemplateError
from inflight.frontend.agents.formats.base import (
    HARMONY_REASONING,
    REASONING_MARKERS,
    TOOL_FORMATS,
    tool_format_name,
)
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.values import parse_json
from inflight.frontend.text.chat_template import ChatTemplate
from inflight.frontend.text.tokenizer import Tokenizer

_NAME = "count_zebras"
_PARK = "Etosha"
_ARGUMENTS = {"park": _PARK, "days": 7}
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
_RESULT = {"role": "tool", "name": _NAME, "content": "It counted 42."}
_LATER = (
    {"role": "assistant", "content": "There are 42."},
    {"role": "user", "content": "And how many lions?"},
)
_ARGUMENT_FORMS: tuple[Any, ...] = (_ARGUMENTS, json.dumps(_ARGUMENTS))
_IDS = (f"functions.{_NAME}:0", "a1B2c3D4e")
_STRAY = re.compile(r"\b(None|null|undefined)\b")
# Formats whose templates only describe calls in words, and how they do so.
_DESCRIBED = {"granite": "<|tool_call|>", "phi4_mini": "functools", "internlm2": "<|action_start|>"}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template accepts the calls of earlier turns."""

    arguments_as_text: bool = False  # otherwise as an object
    empty_content: str | None = None  # the content of a message that only calls tools
    short_ids: bool = False  # nine letters or digits
    # The reasoning of a message is its `thinking`; with calls, it has no other content.
    thinking: bool = False


_STYLES = tuple(
    CallStyle(as_text, content, short_ids)
    for as_text, content, short_ids in product((False, True), (None, ""), (False, True))
)


@dataclass(frozen=True, slots=True)
class DetectedCalls:
    """How a checkpoint writes and reads calls, according to its template."""

    tool_format: str  # a name in `TOOL_FORMATS`
    style: CallStyle


def detect_calls(template: ChatTemplate, reasoning_format: str | None = None) -> DetectedCalls | None:
    """Return how the model writes calls, or None if the template does not show it.

    Raises only if templates cannot be rendered at the moment.
    """
    try:
        renderings = list(_render_calls(template))
    except RequestError:  # the template rejects tools, or all messages
        return None
    candidates = []
    for (style, text), name in product(renderings, TOOL_FORMATS):
        message = MessageParser(name, reasoning_format, tools=[_TOOL]).parse(text)
        if [call.name for call in message.tool_calls] != [_NAME]:
            continue
        if parse_json(message.tool_calls[0].arguments) == _ARGUMENTS:
            candidates.append((len(message.content), style, name))
    if not candidates and not any(_PARK in text for _, text in renderings):
        described = (name for name, words in _DESCRIBED.items() if template.mentions(words))
        candidates = [(0, style, name) for name in described for style, _ in renderings]
    if not candidates:
        return None
    # A format that leaves the least text unread is the most specific one.
    flaws = {
        style: _count_flaws(template, style) for style in dict.fromkeys(style for _, style, _ in candidates)
    }
    _, style, name = min(candidates, key=lambda candidate: (flaws[candidate[1]], candidate[0]))
    thinking = template.mentions(".thinking") and not template.mentions("reasoning_content")
    return DetectedCalls(name, replace(style, thinking=thinking))


def detect_tool_format(template: ChatTemplate, reasoning_format: str | None = None) -> str | None:
    """Return only the name of the tool call format."""
    calls = detect_calls(template, reasoning_format)
    return None if calls is None else calls.tool_format


def shows_tools(template: ChatTemplate) -> bool:
    """Return whether the model gets to see tools at all: some templates omit or reject them."""
    for messages in ([_QUESTION], [{"role": "system", "content": "Be brief."}, _QUESTION]):
        try:
            if _NAME in template.render(messages, tools=[_TOOL]):
                return True
        except RequestError:
            continue
    return False


def detect_reasoning_format(template: ChatTemplate, tokenizer: Tokenizer | None = None) -> str | None:
    """Return the name of the reasoning format, one of `REASONING_FORMATS`, or None. Never raises.

    Templates remove the reasoning of earlier turns, or open that of the next, and so contain its markers. If they do
    not, the vocabulary may have tokens for them, which no other model has.
    """
    if template.mentions("<|channel|>") and template.mentions("analysis"):
        return HARMONY_REASONING
    # Some formats have the markers of another one, and more: these come first.
    formats = sorted(REASONING_MARKERS.items(), key=lambda item: -len(item[1].markers))
    for name, markers in formats:
        if not all(map(template.mentions, markers.mentions or (markers.close,))):
            continue
        answer_tags = [text for text in markers.mentions if text != markers.close]
        if not answer_tags or not _only_around_results(template, answer_tags):
            return name
    for name, markers in formats:
        ids = [tokenizer and tokenizer.token_id(text) for text in markers.markers]
        if None not in ids:
            return name
    return None


def _only_around_results(template: ChatTemplate, texts: Sequence[str]) -> bool:
    """Return whether the template writes one of these texts around the results of tools, and nowhere else: as
    MiniMax-M2's writes <response>, which ends a block of reasoning elsewhere. Never raises."""
    for style in _STYLES:
        call, result = _call(style), {**_RESULT, "tool_call_id": _IDS[style.short_ids]}
        try:
            asked = template.render([_QUESTION, call], tools=[_TOOL], add_generation_prompt=False)
            answered = template.render([_QUESTION, call, result], tools=[_TOOL], add_generation_prompt=False)
            others = asked + template.render([_QUESTION, *_LATER])
        except RequestError:
            continue
        return any(text in answered and text not in others for text in texts)
    return False


def call_marker_ids(tool_format: str | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that start a call, where the format has its own tokens for that."""
    if tool_format is None or tokenizer is None:
        return frozenset()
    openings = TOOL_FORMATS.get(tool_format_name(tool_format) or "").openings.texts
    return tokenizer.added_ids.intersection(map(tokenizer.token_id, openings))


def opens_reasoning(template: ChatTemplate, reasoning_format: str | None) -> bool:
    """Return whether prompts open the block when reasoning is on, so that other prompts ask for none. Never raises."""
    markers, kwargs = REASONING_MARKERS.get(reasoning_format or ""), template.effort_kwargs("high")
    if markers is None or not kwargs:
        return False
    try:
        return bool(markers.opened_by(template.render([_QUESTION], kwargs=kwargs)))
    except TemplateError:
        return False


def _render_calls(template: ChatTemplate) -> Iterator[tuple[CallStyle, str]]:
    """Render the output that the model would have written, for each style that the template accepts."""
    tools = [_TOOL]
    question = template.render([_QUESTION], tools=tools, add_generation_prompt=False)
    prompt = template.render([_QUESTION], tools=tools)
    for style in _STYLES:
        try:
            text = template.render([_QUESTION, _call(style)], tools=tools, add_generation_prompt=False)
        except TemplateError:
            continue
        # A prompt may end with the start of only some answers, such as an opened block of reasoning.
        if text.startswith(prompt):
            yield style, text[len(prompt) :]
        differing = (
            index for index, pair in enumerate(zip(question, text, strict=False)) if pair[0] != pair[1]
        )
        yield style, text[next(differing, min(len(question), len(text))) :]


def _call(style: CallStyle) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": _ARGUMENT_FORMS[style.arguments_as_text]}
    call = {"id": _IDS[style.short_ids], "type": "function", "function": function}
    return {"role": "assistant", "content": style.empty_content, "tool_calls": [call]}


def _count_flaws(template: ChatTemplate, style: CallStyle) -> int:
    """Return how many parts of a whole conversation the template loses in this style, or adds to it."""
    messages = [_QUESTION, _call(style), {**_RESULT, "tool_call_id": _IDS[style.short_ids]}, *_LATER]
    try:
        text = template.render(messages, tools=[_TOOL])
    except TemplateError:
        return len(messages)
    lost = sum(message["content"] not in text for message in (_RESULT, *_LATER))
    return lost + len(_STRAY.findall(text))
