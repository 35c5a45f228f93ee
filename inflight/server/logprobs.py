"""Log-probabilities as the two APIs write them, straight from what the engine sends.

Long arrays are iterators of batches (see `json_pieces`), so that no one waits for the JSON of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from inflight.events import PositionLogprobs, logprob_columns, own_logprob, unpack_logprobs
from inflight.server.formatters import encode
from inflight.text import Tokenizer

T = TypeVar("T")

LEAST = -9999.0  # JSON has no infinity
MAX_BATCH = 1024  # candidates whose JSON is made in one go
MAX_KEPT_TOKENS = 16384  # whose JSON is kept


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def _most_likely(position: PositionLogprobs, count: int) -> list[tuple[int, float]]:
    """Return ids and logprobs of the most likely tokens, best first; the token itself is among them only where it is
    that likely."""
    ids, logprobs, ranks = logprob_columns(position)
    own = ids[0]
    places = sorted(range(len(ids)), key=ranks.__getitem__)
    return [
        (ids[place], logprobs[place])
        for place in places
        if ranks[place] <= count and (not place or ids[place] != own)
    ][:count]


def _batches(
    items: Sequence[T], candidates_each: int, write: Callable[[Sequence[T]], Iterable[bytes]]
) -> Iterator[msgspec.Raw]:
    size = max(1, MAX_BATCH // candidates_each)
    for start in range(0, len(items), size):
        yield msgspec.Raw(b",".join(write(items[start : start + size])))


def _plain_batches(items: Sequence[Any]) -> Iterator[msgspec.Raw]:
    return _batches(items, 1, lambda batch: map(encode, batch))


def completion_logprobs(
    token_ids: list[int],
    positions: Sequence[PositionLogprobs | None],
    count: int,
    tokenizer: Tokenizer | None,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """Return parallel lists with an item for each token, and the offset behind the last one. Nothing predicts the first
    token of a prompt: its position is None."""
    tokens = [_text(token_id, tokenizer) for token_id in token_ids]
    *offsets, end = accumulate(map(len, tokens), initial=offset)

    def write_top(batch: Sequence[PositionLogprobs | None]) -> Iterator[bytes]:
        for position in batch:
            if position is None:
                yield b"null"
                continue
            top = dict(_most_likely(position, count))
            top.setdefault(logprob_columns(position)[0][0], own_logprob(position))
            yield encode({_text(token_id, tokenizer): _finite(logprob) for token_id, logprob in top.items()})

    chosen = [None if position is None else _finite(own_logprob(position)) for position in positions]
    logprobs = {
        "text_offset": _plain_batches(offsets),
        "token_logprobs": _plain_batches(chosen),
        "tokens": _plain_batches(tokens),
        "top_logprobs": _batches(positions, 1 + count, write_top) if count else None,
    }
    return logprobs, end


def chat_logprobs(
    positions: Sequence[PositionLogprobs], count: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return an object for each token, each with the most likely others."""

    def write(batch: Sequence[PositionLogprobs]) -> Iterator[bytes]:
        for position in batch:
            own = _token_json(logprob_columns(position)[0][0], own_logprob(position), tokenizer)
            top = [_token_json(*candidate, tokenizer) for candidate in _most_likely(position, count)]
            yield b'%b,"top_logprobs":[%b]}' % (own.removesuffix(b"}"), b",".join(top))

    return {"content": _batches(positions, 1 + count, write), "refusal": None}


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, count: int, tokenizer: Tokenizer | None
) -> Iterator[msgspec.Raw] | None:
    """Return objects by token id, as the engine has them."""
    if positions is None:
        return None

    def write(batch: Sequence[PositionLogprobs | None]) -> Iterator[bytes]:
        for position in batch:
            candidates = () if position is None else unpack_logprobs(position)
            found = {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": None if tokenizer is None else tokenizer.text_of(token_id),
                }
                for token_id, logprob, rank in candidates
            }
            yield b"null" if position is None else encode(found)

    return _batches(positions, 1 + count, write)


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.text_of(token_id)


def _token_json(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> bytes:
    before, after = _around_logprob(token_id, tokenizer)
    return before + encode(_finite(logprob)) + after


@lru_cache(MAX_KEPT_TOKENS)
def _around_logprob(token_id: int, tokenizer: Tokenizer | None) -> tuple[bytes, bytes]:
    """The JSON of a token before its logprob and after it: the same tokens come over and over."""
    before = b'{"token":%b,"logprob":' % encode(_text(token_id, tokenizer))
    return before, b',"bytes":%b}' % encode(_bytes(token_id, tokenizer))


def _bytes(token_id: int, tokenizer: Tokenizer | None) -> list[int] | None:
    """A token may be part of a character: only its bytes tell all of it."""
    if tokenizer is None:
        return None
    if tokenizer.byte_decoder is not None:
        return list(tokenizer.byte_decoder.pieces[token_id])
    return list(tokenizer.text_of(token_id).encode())
