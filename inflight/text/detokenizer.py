"""Incremental detokenization.

Let `D` be `Tokenizer.decode` without the hidden special tokens. Then, for any split of the output,

    (what the prompt alone emits) + push(...) + push(...) + ... + flush() == D(prompt + output)

where the prompt emits `D(prompt)` without an incomplete last character, which belongs to the output. A word after a
prompt therefore keeps its leading space, and without a prompt the text is that of the output alone. Characters are
never emitted in part; bytes that can no longer be completed are emitted as U+FFFD at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Protocol

from inflight.text.byte_decoder import ByteDecoder
from inflight.text.tokenizer import Tokenizer

MAX_PENDING = 8  # ids that may be held back for a decoder of unknown shape
_MAX_CHARACTER_BYTES = 4  # in UTF-8


class _Stream(Protocol):
    def begin(self, backwards: Iterator[int]) -> None:
        """Continue after a prompt, whose ids are given in reverse; only as many as needed are read."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Converts the tokens of one output to text, in constant time per token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Create a detokenizer. `shown_ids` are special tokens that are never skipped."""
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        decoder = tokenizer.byte_decoder
        self._stream: _Stream = _ByteStream(decoder) if decoder else _WindowStream(tokenizer)
        self._stream.begin(token_id for token_id in reversed(prompt_ids) if token_id not in self._hidden)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        return self._stream.push([token_id for token_id in ids if token_id not in self._hidden])

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        return self._stream.flush()


class _ByteStream:
    """For decoders that concatenate bytes: a table and an incremental UTF-8 decoder."""

    def __init__(self, decoder: ByteDecoder) -> None:
        self._decoder = decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")(decoder.errors)
        self._max_strip = 0  # characters that may still be stripped from the start

    def begin(self, backwards: Iterator[int]) -> None:
        tail: list[bytes] = []
        size = 0
        for token_id in backwards:
            tail.append(self._decoder.pieces[token_id])
            size += len(tail[-1])
            if size >= _MAX_CHARACTER_BYTES:  # long enough to contain any incomplete character
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
            text, self._max_strip = self._decoder.strip_start(text, self._max_strip)
        return text


class _WindowStream:
    """For other decoders (WordPiece, Metaspace, none), where a token's text depends only on the previous token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._last: list[int] = []  # the previous id
        self._pending: list[int] = []

    def begin(self, backwards: Iterator[int]) -> None:
        self._last = next(([token_id] for token_id in backwards if self._tokenizer.knows(token_id)), [])

    def push(self, ids: Sequence[int]) -> str:
        self._pending += filter(self._tokenizer.knows, ids)
        text = self._pending_text()
        # Such decoders rarely build characters from bytes. If one does, wait a while for the rest.
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
