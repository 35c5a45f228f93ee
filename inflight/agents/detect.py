"""Which formats a checkpoint has, by its own chat template.

A template writes the calls of earlier turns just as the model is to write new ones. So a call is rendered, and the
format whose parser reads exactly that call is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from inflight.agents.parser import MessageParser
from inflight.agents.python_literals import parsed_json
from inflight.agents.thinking import HARMONY_REASONING, THINKING
from inflight.agents.tool_format import TOOL_FORMATS
from inflight.errors import InflightError, TemplateError
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
# Templates differ in what they take: arguments as an object or as text, no content or an empty one, ids of some form.
_ARGUMENT_FORMS: tuple[Any, ...] = (_ARGUMENTS, json.dumps(_ARGUMENTS))
_CONTENT_FORMS = (None, "")
_IDS = (f"functions.{_NAME}:0", "a1B2c3D4e")


def detect_tool_format(template: ChatTemplate, reasoning_format: str | None = None) -> str | None:
    """The name of the tool format, for `TOOL_FORMATS`; None where the template does not tell. Never raises."""
    try:
        renderings = list(_rendered_calls(template))
    except InflightError:  # it takes no tools, or no messages at all
        return None
    for text, name in product(renderings, TOOL_FORMATS):
        message = MessageParser(name, reasoning_format, tools=[_TOOL]).parse(text)
        if [call.name for call in message.tool_calls] != [_NAME]:
            continue
        if parsed_json(message.tool_calls[0].arguments) == _ARGUMENTS:
            return name
    return None


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


def _rendered_calls(template: ChatTemplate) -> Iterator[str]:
    """What the model would have written, in the first form of a call that the template takes."""
    tools = [_TOOL]
    asked = template.render([_QUESTION], tools=tools, add_generation_prompt=False)
    prompt = template.render([_QUESTION], tools=tools)
    for arguments, content, call_id in product(_ARGUMENT_FORMS, _CONTENT_FORMS, _IDS):
        function = {"name": _NAME, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            text = template.render([_QUESTION, message], tools=tools, add_generation_prompt=False)
        except TemplateError:
            continue
        # A prompt may end with what only some answers begin with, such as a block of reasoning.
        if text.startswith(prompt):
            yield text[len(prompt) :]
        differing = (at for at, pair in enumerate(zip(asked, text, strict=False)) if pair[0] != pair[1])
        yield text[next(differing, min(len(asked), len(text))) :]
