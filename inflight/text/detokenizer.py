"""Token ids to text, a few at a time.

Let `D` be `Tokenizer.decode` without the hidden special tokens. Then for any split of the output

    (what the prompt alone emits) + push(...) + push(...) + ... + flush() == D(prompt + output)

where the prompt emits `D(prompt)` less a character that its last bytes only begin: that character is
the output's. A word after a prompt therefore keeps its leading space, and without a prompt the text is
that of the output alone. Text never leaves in halves of a character; bytes that cannot be completed any
more come out as U+FFFD at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Protocol

from inflight.text.byte_decoder import ByteDecoder
from inflight.text.tokenizer import Tokenizer

MAX_PENDING = 8  # ids that a decoder of unknown shape may hold back
_MAX_CHARACTER_BYTES = 4  # in UTF-8


class _Stream(Protocol):
    def begin(self, backwards: Iterator[int]) -> None:
        """Take up after a prompt, of which the ids come last first; only as many are read as matter."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The text of one output as it grows, in constant time per token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        decoder = tokenizer.byte_decoder
        self._stream: _Stream = _ByteStream(decoder) if decoder else _WindowStream(tokenizer)
        self._stream.begin(token_id for token_id in reversed(prompt_ids) if token_id not in self._hidden)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._stream.push([token_id for token_id in ids if token_id not in self._hidden])

    def flush(self) -> str:
        """What was still waiting for more, at the end of the output."""
        return self._stream.flush()


class _ByteStream:
    """For decoders that join bytes: a table and an incremental UTF-8 decoder."""

    def __init__(self, decoder: ByteDecoder) -> None:
        self._decoder = decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")(decoder.errors)
        self._max_strip = 0  # characters that may still be cut from the beginning

    def begin(self, backwards: Iterator[int]) -> None:
        tail: list[bytes] = []
        size = 0
        for token_id in backwards:
            tail.append(self._decoder.pieces[token_id])
            size += len(tail[-1])
            if size >= _MAX_CHARACTER_BYTES:  # enough to hold a character begun, and past the beginning
                break
        else:
            self._max_strip = self._decoder.max_strip
        self._decode(b"".join(reversed(tail)))

    def push(self, ids: Sequence[int]) -> str:
        return self._decode(b"".join(map(self._decoder.pieces.__getitem__, ids)))

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._max_strip:
            text, self._max_strip = self._decoder.cut(text, self._max_strip)
        return text


class _WindowStream:
    """For other decoders (WordPiece, Metaspace, none): a token's text depends on the one before it only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._last: list[int] = []  # the one id before
        self._pending: list[int] = []

    def begin(self, backwards: Iterator[int]) -> None:
        self._last = next(([token_id] for token_id in backwards if self._tokenizer.knows(token_id)), [])

    def push(self, ids: Sequence[int]) -> str:
        self._pending += filter(self._tokenizer.knows, ids)
        text = self._pending_text()
        # Such decoders seldom make characters out of bytes; where one does, wait for the rest a while.
        if text.endswith("\ufffd") and len(self._pending) < MAX_PENDING:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._pending_text()
        self._advance()
        return text

    def _advance(self) -> None:
        self._last = self._pending[-1:] or self._last
        self._pending = []

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._last, skip_special_tokens=False)
        return self._tokenizer.decode(self._last + self._pending, skip_special_tokens=False)[len(before) :]
