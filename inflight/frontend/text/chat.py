"""Chat messages to token ids.

Special tokens come only from the template: text in a message that spells one stays text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.frontend.text.chat_template import ChatTemplate, Message, Scalar, check_messages
from inflight.frontend.text.tokenizer import Tokenizer


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

    def escaped_inputs(escaper: SpecialTokenEscaper) -> dict[str, Any]:
        return {
            "messages": [escaper.escape(escaper.join_parts(message)) for message in messages],
            "tools": escaper.escape(tools),
            "kwargs": escaper.escape(kwargs),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    escaper = SpecialTokenEscaper(tokenizer)
    text = template.render(**escaped_inputs(escaper))
    if template.may_join_text:
        careful = SpecialTokenEscaper(tokenizer, escape_first_characters=True)
        inputs = escaped_inputs(careful)
        if careful.num_escaped > escaper.num_escaped:
            second = template.render(**inputs)
            if careful.specials_in(second) != escaper.specials_in(text):
                return careful.encode(second, check_size)
    return escaper.encode(text, check_size)


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
