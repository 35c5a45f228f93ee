"""Keeps what a request says from becoming special tokens.

A message may spell one: `<|im_end|>` in a user's text would end the user's turn. Such spellings are exchanged for marks
before the template sees them, and are tokenized as the plain text that they are. So are pieces of them at the ends of
any string, for what a template puts beside it may be the rest, and spellings in other letters, which it may make small.
Messages without any of these, which is nearly all, take the plain way and have the ids that the checkpoint was trained
on.

A template that takes something out of a text may join what was on both sides of it. Then the prompt is made a second
time, with marks for all signs that a special token begins with, to see whether it did.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from inflight.text.tokenizer import Tokenizer


class Marks:
    """Spellings of special tokens, exchanged for words that no message holds."""

    def __init__(self, tokenizer: Tokenizer, hide_first_characters: bool = False) -> None:
        """With first characters hidden too, signs all of them, nothing that is left can become a special token."""
        self._tokenizer = tokenizer
        spellings = tokenizer.special_spellings
        self._longest = len(spellings[0]) - 1 if spellings else 0  # piece
        first = {text[0] for text in spellings if not text[0].isalnum()} if hide_first_characters else ()
        hidden = [*spellings, *first]
        self._pattern = re.compile("|".join(map(re.escape, hidden)), re.IGNORECASE) if spellings else None
        self._word = f"mark{secrets.token_hex(8)}x"
        self._hidden: list[str] = []

    @property
    def num_hidden(self) -> int:
        return len(self._hidden)

    def join_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
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
        """The same message, tool or argument, or any part of one, with marks in its strings."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._hide_pieces(self._pattern.sub(self._mark, value))
        if isinstance(value, Mapping):  # names too: a tool's parameters are written out
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list | tuple) else value

    def _hide_pieces(self, text: str) -> str:
        """With marks for pieces of special tokens at both ends, which may be trimmed: `<|im_` and the `end|>` of
        another field would be one where a template puts the two side by side, `|im_end|` where it writes `<...>`."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if 0 < end - start <= self._longest and self._is_middle(text[start:end]):
            return text[:start] + self._new_mark(text[start:end]) + text[end:]
        for length in range(min(self._longest, end - start), 0, -1):
            if text[end - length : end].lower() in self._tokenizer.special_beginnings:
                text = text[: end - length] + self._new_mark(text[end - length : end]) + text[end:]
                break
        for length in range(min(self._longest, end - start), 1, -1):
            if text[start : start + length].lower() in self._tokenizer.special_endings:
                return text[:start] + self._new_mark(text[start : start + length]) + text[start + length :]
        return text

    def _is_middle(self, text: str) -> bool:
        """Whether it is a piece of a special token, but no plain word: templates compare those, and look them up."""
        return not text.isidentifier() and any(
            text.lower() in spelling.lower() for spelling in self._tokenizer.special_spellings
        )

    def _mark(self, found: re.Match[str]) -> str:
        return self._new_mark(found.group())

    def _new_mark(self, hidden: str) -> str:
        self._hidden.append(hidden)
        return f"{self._word}{len(self._hidden) - 1}z"

    def specials_in(self, text: str) -> list[str]:
        """The special tokens of a rendered text."""
        spellings = map(re.escape, self._tokenizer.special_spellings)
        return re.findall("|".join(spellings) or "(?!)", text)

    def encode(self, text: str, check_size: Callable[[int], None] | None = None) -> tuple[str, list[int]]:
        """Return the rendered text with its spellings back, and its ids. `check_size` gets the number of characters
        before they are tokenized, and raises if there are too many."""
        tokenizer = self._tokenizer
        if not self._hidden:
            if check_size is not None:
                check_size(len(text))
            return text, tokenizer.encode(text, add_special_tokens=False)
        # Text, number, text, ... A template may write all in capitals, or cut a mark, which may then have any number.
        parts = re.split(f"{self._word}([0-9]{{1,9}})z", text, flags=re.IGNORECASE)
        parts[1::2] = [self._hidden[int(n)] if int(n) < self.num_hidden else "" for n in parts[1::2]]
        if check_size is not None:
            check_size(sum(map(len, parts)))
        # Each once: there may be a hundred thousand of a few.
        texts, spelled = dict.fromkeys(parts[::2]), dict.fromkeys(parts[1::2])
        known = (
            dict(zip(texts, tokenizer.encode_batch([*texts], False), strict=True)),
            dict(zip(spelled, tokenizer.encode_batch([*spelled], False, parse_special=False), strict=True)),
        )
        ids = [token_id for index, part in enumerate(parts) for token_id in known[index % 2][part]]
        return "".join(parts), ids
