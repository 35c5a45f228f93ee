"""A compiler with the built-in model's tokens, and random walks through a constraint's grammar."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.matcher import MaskBatch, MaskFiller, Matcher
from inflight.constraints.validator import GrammarValidator
from inflight.constraints.vocabulary import Vocabulary
from inflight.frontend.input_processor import vocabulary_of
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.structured_outputs import StructuredOutputs

PADDING = 70  # a model's vocabulary may be wider than its tokenizer's
HURRY_AFTER = 40
MAX_TOKENS = 1000
MAX_SPELLINGS = 200  # orders of properties that are tried for one value


class NoEndError(AssertionError):
    """A walk reached no end of its text in `MAX_TOKENS` tokens."""


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
    MaskBatch(MaskFiller(), [matcher], [0]).fill(mask[None])
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def accepts(constraint: StructuredOutputs, text: str) -> bool:
    """Whether the grammar accepts a text, spelled in single bytes."""
    state: Any = compiler().compile(constraint).matcher().state
    ids = [_byte_ids()[byte] for byte in text.encode()]
    return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())


def _spellings(value: Any) -> Iterator[Any]:
    """Yield a value with its objects' properties in every order."""
    if isinstance(value, list):
        for items in itertools.product(*map(_first_spellings, value)):
            yield list(items)
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for items in itertools.product(*(_first_spellings(value[name]) for name in names)):
                yield dict(zip(names, items, strict=True))
    else:
        yield value


def _first_spellings(value: Any) -> list[Any]:
    return list(itertools.islice(_spellings(value), MAX_SPELLINGS))


def accepts_value(constraint: StructuredOutputs, value: Any) -> bool:
    """Whether the grammar accepts a value with its properties in some order."""
    texts = (json.dumps(spelling, ensure_ascii=False) for spelling in _spellings(value))
    return any(accepts(constraint, text) for text in itertools.islice(texts, MAX_SPELLINGS))


@cache
def _byte_ids() -> list[int]:
    pieces = list(vocabulary().pieces)
    return [pieces.index(bytes([byte])) for byte in range(256)]


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
    raise NoEndError(f"no end after {_text(ids)!r}")


def _text(ids: list[int]) -> str:
    return b"".join(vocabulary().pieces[i] for i in ids).decode()
