"""Messages to token ids, with special tokens from nowhere but the template.

A message may spell a special token: `<|im_end|>` in a user's text would end the user's turn. Such spellings are
exchanged for marks before the template sees them, and are tokenized as the plain text that they are. Messages
without them, which is nearly all, take the plain way and have the ids that the checkpoint was trained on.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.text.chat import ChatTemplate, Message, Scalar, check_messages
from inflight.text.tokenizer import Tokenizer


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Scalar] | None = None,
) -> tuple[str, list[int]]:
    """The prompt's text and its token ids."""
    check_messages(messages)
    marks = _Marks(tokenizer)
    text = template.render(
        [marks.hide(marks.join_parts(message)) for message in messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=kwargs,
    )
    return marks.encode(text)


class _Marks:
    """Spellings of special tokens, exchanged for words that no message holds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spellings = sorted(filter(None, map(tokenizer.token, tokenizer.special_ids)), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._word = f"mark{secrets.token_hex(8)}x"
        self._hidden: list[str] = []

    def join_parts(self, message: Message) -> Message:
        """One part in place of several, where the text that they make together spells a special token."""
        content = message.get("content")
        if self._pattern is None or not isinstance(content, list):
            return message
        text = "".join(part["text"] for part in content)
        return (
            {**message, "content": [{"type": "text", "text": text}]}
            if self._pattern.search(text)
            else message
        )

    def hide(self, value: Any) -> Any:
        """The same message, or any part of it, with marks in its strings."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(self._mark, value) if self._pattern.search(value) else value
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def _mark(self, found: re.Match[str]) -> str:
        self._hidden.append(found.group())
        return f"{self._word}{len(self._hidden) - 1}z"

    def encode(self, text: str) -> tuple[str, list[int]]:
        """The rendered text with its spellings back, and its ids."""
        tokenizer = self._tokenizer
        if not self._hidden:
            return text, tokenizer.encode(text, add_special_tokens=False)
        parts = re.split(f"{self._word}([0-9]+)z", text)  # text, number, text, ...
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                parts[index] = self._hidden[int(part)]
            plain = index % 2 == 1
            ids += tokenizer.encode(parts[index], add_special_tokens=False, parse_special=not plain)
        return "".join(parts), ids
