"""What each token adds to a text, as bytes.

The decoders of nearly every language model are of one of two shapes, and both only join bytes:

- `ByteLevel` (GPT-2, Llama 3, Qwen): every character of a token stands for one byte.
- `Replace*, ByteFallback, Fuse, [Strip]` (Llama 2, Mistral, Gemma): tokens are text, apart from
  `<0xE2>` and its like, which are one byte each; a space at the very beginning may be cut.

A text is then the UTF-8 of the bytes joined, which is what makes streaming cheap and exact. For the
second shape `tokenizers` turns every byte of a run of byte tokens into U+FFFD when any of them is
malformed, also the characters before it, which a stream has long sent. Here only the malformed bytes
become U+FFFD, one each; well-formed text is the same.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "inflight-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 upwards."""
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
    """Bytes by token id, computed when first asked. Unknown ids have none."""

    def __init__(self, spelling: Callable[[int], str | None], to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self._spelling = spelling
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        # The backend takes unsigned 32 bit ids only. Unknown ids are not kept: there are too many.
        token = self._spelling(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        piece = self[token_id] = self._to_bytes(token)
        return piece


class ByteDecoder:
    """A decoder that joins bytes: the piece of each token, and how the joined bytes become text."""

    def __init__(
        self, pieces: _Pieces, *, errors: str, own: bool, strip: str = "", max_strip: int = 0
    ) -> None:
        self.pieces = pieces
        self.errors = errors  # of the UTF-8 codec
        self.own = own  # differs from the backend on malformed bytes
        self.strip = strip  # the character cut from the beginning of the text,
        self.max_strip = max_strip  # at most this many times

    @classmethod
    def of(cls, backend: Any) -> ByteDecoder | None:
        """The byte decoder of a `tokenizers.Tokenizer`, None when its decoder does more than join bytes."""
        decoder = backend.decoder
        spec = None if decoder is None else json.loads(decoder.__getstate__())
        if spec is None:
            return None
        if spec["type"] == "ByteLevel":
            return cls(_Pieces(backend.id_to_token, _from_byte_level), errors="replace", own=False)
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
        return cls(pieces, errors=_EACH_BYTE, own=True, strip=strip, max_strip=max_strip)

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join(map(self.pieces.__getitem__, ids)).decode(errors=self.errors)
        return self.cut(text, self.max_strip)[0]

    def cut(self, text: str, max_strip: int) -> tuple[str, int]:
        """The beginning of a text after stripping, and how many more characters may still be stripped."""
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
