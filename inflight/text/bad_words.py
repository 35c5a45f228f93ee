"""Words that must not be produced, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.errors import ParameterError
from inflight.text.tokenizer import Tokenizer

IdSequence = tuple[int, ...]


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[IdSequence, ...]:
    """The sequences whose last token is forbidden when the tokens before it have just been produced.

    Every word counts both at the beginning of a text and after a space, as these are different tokens.
    """
    stripped = [word.lstrip() or word for word in words]
    encoded = tokenizer.encode_batch(
        [*stripped, *(f" {word}" for word in stripped)], add_special_tokens=False
    )
    for word, ids in zip(words, encoded, strict=False):  # those without a space
        if not ids:
            raise ParameterError(
                f"bad_words has {word!r}: this tokenizer has no tokens for it", param="bad_words"
            )
    found = dict.fromkeys(tuple(ids) for ids in encoded if ids)
    lengths = {len(ids) for ids in found}
    # A sequence that ends in another forbidden one adds nothing: the shorter one is always met first.
    return tuple(
        ids for ids in found if not any(ids[-length:] in found for length in lengths if length < len(ids))
    )
