"""A model's tokens as the bytes that each adds to a text, which is how a grammar sees them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


# Where a grammar allows all texts of one of these patterns, llguidance allows its tokens all at once, not one by one.
# There are so many because a string of bounded length allows shorter and shorter texts as it fills up.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{longest}}}" for longest in (2, 4, 6, 8, 10, 15, 30)),
    f"{_CHARACTER}+",
]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, one for each logit."""

    pieces: Sequence[bytes]  # b"" for a token that stands for nothing and never matches
    special_ids: frozenset[int]  # tokens that match no text, whatever they spell
    eos_token_ids: tuple[int, ...]  # at least one
    # Returns the tokens of a text as the tokenizer spells it. It is not needed for masks, and not packed.
    spell: Callable[[str], list[int]] | None = None

    def tokenizer(self) -> LLTokenizer:
        """Build llguidance's view of the vocabulary, which takes up to a second for 150,000 tokens."""
        from llguidance import LLTokenizer

        ends = list(self.eos_token_ids)
        return LLTokenizer(TokenPieces(self), eos_token=ends, slices=SLICES)  # type: ignore[arg-type]

    def special_texts(self) -> frozenset[str]:
        ids = (i for i in self.special_ids if i < len(self.pieces))
        return frozenset(self.pieces[token_id].decode(errors="replace") for token_id in ids)

    def packed(self) -> bytes:
        """Serialize the vocabulary for another process."""
        sizes, special_ids = list(map(len, self.pieces)), sorted(self.special_ids)
        return b"\n".join([json.dumps([sizes, special_ids, self.eos_token_ids]).encode(), *self.pieces])

    @classmethod
    def unpacked(cls, data: bytes) -> Vocabulary:
        head, _, _ = data.partition(b"\n")
        sizes, special_ids, eos_token_ids = json.loads(head)
        starts = accumulate((size + 1 for size in sizes), initial=len(head) + 1)
        pieces = [data[start : end - 1] for start, end in pairwise(starts)]
        return cls(pieces, frozenset(special_ids), tuple(eos_token_ids))


class TokenPieces:
    """The attributes of a tokenizer that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special_ids | set(vocabulary.eos_token_ids)
        self.special_token_ids = sorted(i for i in special if i < len(vocabulary.pieces))
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = list(vocabulary.pieces)
        for token_id in self.special_token_ids:  # must be distinct
            self.tokens[token_id] = self.tokens[token_id] or b"<%d>" % token_id
        self._longest = max(map(len, self.tokens), default=1)
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text in some way. Called only if a user's grammar insists on forced tokens."""
        data, ids, start = text.encode(), [], 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if data[start:end] in self._ids:
                    ids.append(self._ids[data[start:end]])
                    break
            else:
                return ids
            start = end
        return ids
