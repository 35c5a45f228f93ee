"""Generated token ids to text: the bytes of tokens, and incremental detokenization.

Let `D` be `Tokenizer.decode` without the hidden special tokens. Then, for any split of the output,

    (what the prompt alone emits) + push(...) + push(...) + ... + flush() == D(prompt + output)

where the prompt emits `D(prompt)` without an incomplete last character, which belongs to the output. A word after a
prompt therefore keeps its leading space, and without a prompt the text is that of the output alone. Characters are
never emitted in part; bytes that can no longer be completed are emitted as U+FFFD at once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # `tokenizer.py` imports this module
    from inflight.frontend.text.tokenizer import Tokenizer

MAX_HELD = 8  # ids that may be held back for a decoder of unknown shape
_MAX_CHARACTER_BYTES = 4  # in UTF-8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "inflight-each-byte"


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
        self._previous: list[int] = []  # the previous id
        self._pending: list[int] = []

    def begin(self, backwards: Iterator[int]) -> None:
        self._previous = next(([token_id] for token_id in backwards if self._tokenizer.knows(token_id)), [])

    def push(self, ids: Sequence[int]) -> str:
        self._pending += filter(self._tokenizer.knows, ids)
        text = self._pending_text()
        # Such decoders rarely build characters from bytes. If one does, wait a while for the rest.
        if text.endswith("\ufffd") and len(self._pending) < MAX_HELD:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._pending_text()
        self._advance()
        return text

    def _advance(self) -> None:
        self._previous = self._pending[-1:] or self._previous
        self._pending = []

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._previous, skip_special_tokens=False)
        return self._tokenizer.decode(self._previous + self._pending, skip_special_tokens=False)[
            len(before) :
        ]


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 characters stand for themselves, U+0100 upwards for other bytes."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_characters()


class _Pieces(dict[int, bytes]):
    """Bytes by token id, computed on first use. Unknown ids have no bytes."""

    def __init__(self, spelling: Callable[[int], str | None], to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self._spelling = spelling
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        # The backend accepts only unsigned 32-bit ids. Unknown ids are not cached: there are too many.
        token = self._spelling(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        piece = self[token_id] = self._to_bytes(token)
        return piece


class ByteDecoder:
    """A decoder that concatenates the bytes of tokens and decodes them as UTF-8.

    The decoders of nearly all language models have one of two shapes, and both only concatenate bytes:

    - `ByteLevel` (GPT-2, Llama 3, Qwen): every character of a token stands for one byte.
    - `Replace*, ByteFallback, Fuse, [Strip]` (Llama 2, Mistral, Gemma): tokens are text, apart from tokens like
      `<0xE2>`, which are one byte each; a leading space may be stripped.

    For the second shape, `tokenizers` turns every byte of a run of byte tokens into U+FFFD if any of them is malformed,
    including earlier characters that a stream has already sent. Here only the malformed bytes become U+FFFD, one each;
    well-formed text is the same.
    """

    def __init__(
        self, pieces: _Pieces, *, errors: str, differs: bool, strip: str = "", max_strip: int = 0
    ) -> None:
        self.pieces = pieces
        self.errors = errors  # the error handler of the UTF-8 codec
        self.differs = differs  # from the backend, on malformed bytes
        self.strip = strip  # the character stripped from the start of the text,
        self.max_strip = max_strip  # at most this many times

    @classmethod
    def from_backend(cls, backend: Any) -> ByteDecoder | None:
        """Return the decoder of a `tokenizers.Tokenizer`, or None if it does more than concatenate bytes."""
        decoder = backend.decoder
        spec = None if decoder is None else json.loads(decoder.__getstate__())
        if spec is None:
            return None
        if spec["type"] == "ByteLevel":
            return cls(_Pieces(backend.id_to_token, _from_byte_level), errors="replace", differs=False)
        steps = spec.get("decoders", ())
        kinds = [step["type"] for step in steps]
        if "ByteFallback" not in kinds:
            return None
        split = kinds.index("ByteFallback")
        before, after = steps[:split], steps[split + 1 :]
        if not all(step["type"] == "Replace" and "String" in step["pattern"] for step in before):
            return None
        strip, max_strip = "", 0
        if kinds[split + 1 :] == ["Fuse", "Strip"] and after[1]["stop"] == 0:
            strip, max_strip = after[1]["content"], after[1]["start"]
        elif kinds[split + 1 :] != ["Fuse"]:
            return None
        replacements = [(step["pattern"]["String"], step["content"]) for step in before]
        pieces = _Pieces(backend.id_to_token, _from_byte_fallback(replacements))
        return cls(pieces, errors=_EACH_BYTE, differs=True, strip=strip, max_strip=max_strip)

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join(map(self.pieces.__getitem__, ids)).decode(errors=self.errors)
        return self.strip_start(text, self.max_strip)[0]

    def strip_start(self, text: str, max_strip: int) -> tuple[str, int]:
        """Return the stripped start of a text, and how many more characters may still be stripped."""
        for taken in range(max_strip):
            if taken == len(text):
                return "", max_strip - taken
            if text[taken] != self.strip:
                return text[taken:], 0
        return text[max_strip:], 0


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:  # an added token, spelled in plain text
        return token.encode()


def _from_byte_fallback(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode()

    return to_bytes
