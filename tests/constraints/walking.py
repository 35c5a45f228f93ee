"""A compiler with the built-in model's tokens, and random walks through a constraint's grammar."""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from inflight.constraints import GrammarCompiler, GrammarValidator, MaskFiller, Matcher, Vocabulary
from inflight.frontend.input_processor import vocabulary_of
from inflight.models.builtin import checkpoint_folder
from inflight.structured_outputs import StructuredOutputs
from inflight.text import Tokenizer

PADDING = 70  # a model's vocabulary may be wider than its tokenizer's
HURRY_AFTER = 40
MAX_TOKENS = 1000


@cache
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(checkpoint_folder())
    assert tokenizer.eos_token_id is not None
    return vocabulary_of(tokenizer, tokenizer.vocab_size + PADDING, (tokenizer.eos_token_id,))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


@cache
def validator() -> GrammarValidator:
    return GrammarValidator(vocabulary)


def allowed_ids(matcher: Matcher, vocab_size: int | None = None) -> list[int]:
    size = len(vocabulary().pieces) if vocab_size is None else vocab_size
    mask = np.zeros(-(-size // 32), dtype=np.int32)
    MaskFiller().fill([matcher], mask[None])
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def walk(constraint: StructuredOutputs, seed: int) -> str:
    """Return a text of random allowed tokens, preferring those that close brackets after a while."""
    words, matcher = vocabulary(), compiler().compile(constraint).matcher()
    generator, ids = random.Random(seed), list[int]()
    (end,) = words.eos_token_ids
    while len(ids) < MAX_TOKENS:
        allowed = allowed_ids(matcher)
        assert matcher.error is None
        assert allowed, f"nothing may follow {_text(ids)!r}"
        hurries = len(ids) > HURRY_AFTER
        if end in allowed and (hurries or generator.random() < 0.3):
            return _text(ids)
        closing = [i for i in allowed if any(byte in words.pieces[i] for byte in b'"]}')] if hurries else []
        ids.append(generator.choice(closing or allowed))
        if ids[-1] == end:
            return _text(ids[:-1])
        matcher.advance(ids[-1:])
    raise AssertionError(f"no end after {_text(ids)!r}")


def _text(ids: list[int]) -> str:
    return b"".join(vocabulary().pieces[i] for i in ids).decode()
