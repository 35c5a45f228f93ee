"""What a grammar must know of a model's tokens."""

from __future__ import annotations

from inflight.constraints import Vocabulary
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM
from inflight.text import Tokenizer


def vocabulary_of(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """As wide as the logits. Raises ParameterError for models whose texts cannot be constrained."""
    decoder = None if tokenizer is None else tokenizer.byte_decoder
    ends = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
    if tokenizer is None or decoder is None or not ends:
        raise ParameterError(
            f"{PARAM} is given: this engine cannot constrain texts, since "
            + (
                "it runs without a tokenizer"
                if tokenizer is None
                else "its model has no token that ends a text"
                if not ends
                else "its tokenizer's decoder does more than join the bytes of tokens"
            ),
            param=PARAM,
            code="constraints_unavailable",
        )
    return Vocabulary([decoder.pieces[i] for i in range(vocab_size)], tokenizer.special_ids, ends)
