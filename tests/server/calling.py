"""A model that thinks and calls tools as Hermes and Qwen do, and whose template writes all of that back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.scripted import ScriptedBackend, write_folder

_THOUGHTS = (
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    + _THOUGHTS
    + "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = TEMPLATE.replace(_THOUGHTS, "")  # of a model that does not think


def call(name: str, **arguments: Any) -> str:
    """As the model writes it."""
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = "<think>\nI should add.\n</think>\n\nLet me add." + call("add", a=1, b=2) + call("add", a=3, b=4)


class CallingBackend(ScriptedBackend):
    """Answers with a given text."""

    def __init__(self, folder: Path) -> None:
        super().__init__(write_folder(folder, TEMPLATE))

    def say(self, text: str) -> None:
        self.client.script = text

    @property
    def prompt(self) -> str:
        """Return the latest request's prompt as text."""
        tokenizer = self.engine.frontend.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(self.client.requests[-1].token_ids, skip_special_tokens=False)
