"""The first tokens of long texts, without tokenizing what comes after them."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.text import Tokenizer

CHARACTERS_PER_TOKEN = (
    6  # that the first head of a text has; most texts have fewer, and then one head is enough
)
# Where a text is cut, its last tokens are not those that it would have had; so many are dropped. Words are tokenized
# apart from each other: a cut between two of them changes next to nothing. Inside a word it does: WordPiece may come
# to read a word of over 100 letters that it does not know at all.
SPARE_AFTER_WORD, SPARE_INSIDE_WORD = 8, 128


def encode_heads(tokenizer: Tokenizer, texts: Sequence[str], limits: Sequence[int]) -> list[list[int]]:
    """The first tokens of each text, as many as its limit says: what cutting all its tokens would give."""
    found: list[list[int]] = [[]] * len(texts)
    sizes = [(limit + SPARE_AFTER_WORD) * CHARACTERS_PER_TOKEN for limit in limits]
    left = list(range(len(texts)))
    while left:
        heads = [_head(texts[index], sizes[index]) for index in left]
        too_short = []
        for index, (head, spare), ids in zip(
            left, heads, tokenizer.encode_plain([head for head, _ in heads]), strict=True
        ):
            if len(head) == len(texts[index]) or len(ids) >= limits[index] + spare:
                found[index] = ids[: limits[index]]
            else:
                sizes[index] *= 2
                too_short.append(index)
        left = too_short
    return found


def _head(text: str, size: int) -> tuple[str, int]:
    """About so many characters of a text, up to the end of a word if one ends there; and how many of its tokens are
    not to be relied on."""
    if len(text) <= size:
        return text, 0
    for end in range(size, size * 3 // 4, -1):
        if text[end].isspace() and not text[end - 1].isspace():
            return text[:end], SPARE_AFTER_WORD
    return text[:size], SPARE_INSIDE_WORD
