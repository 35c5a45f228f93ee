"""Log-probabilities as the two APIs write them."""

from __future__ import annotations

import math
from typing import Any

from inflight.outputs import Logprob, Logprobs
from inflight.text import Tokenizer

LEAST = -9999.0  # JSON has no infinity


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def _top(position: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    """The most likely ones, best first; the token itself is among them only where it is that likely."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= count][:count]


def _with_own(position: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    """The most likely ones and then the token itself, where it is not among them."""
    return list(dict([*_top(position, count), next(iter(position.items()))]).items())


def completion_logprobs(
    token_ids: list[int],
    positions: list[Logprobs | None],
    count: int,
    tokenizer: Tokenizer | None,
    offset: int,
) -> dict[str, Any]:
    """Parallel lists, one item a token. Nothing predicts the first token of a prompt: its position is None."""
    tokens, offsets, chosen = [], [], []
    top: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        text = _text(token_id, tokenizer)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        chosen.append(None if position is None else _finite(position[token_id].logprob))
        top.append(
            None
            if position is None
            else {
                _text(other, tokenizer): _finite(found.logprob) for other, found in _with_own(position, count)
            }
        )
    return {
        "text_offset": offsets,
        "token_logprobs": chosen,
        "tokens": tokens,
        "top_logprobs": top if count else None,
    }


def chat_logprobs(
    token_ids: list[int], positions: list[Logprobs], count: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """An object a token, each with the most likely others."""
    return {
        "content": [
            {
                **_described(token_id, position[token_id], tokenizer),
                "top_logprobs": [
                    _described(other, found, tokenizer) for other, found in _top(position, count)
                ],
            }
            for token_id, position in zip(token_ids, positions, strict=True)
        ],
        "refusal": None,
    }


def prompt_logprobs(positions: list[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """By token id, as the engine has them."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in position.items()
        }
        for position in positions
    ]


def _described(token_id: int, found: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "token": _text(token_id, tokenizer),
        "logprob": _finite(found.logprob),
        "bytes": _bytes(token_id, tokenizer),
    }


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.text_of(token_id)


def _bytes(token_id: int, tokenizer: Tokenizer | None) -> list[int] | None:
    """A token may be part of a character: only its bytes tell all of it."""
    if tokenizer is None:
        return None
    if tokenizer.byte_decoder is not None:
        return list(tokenizer.byte_decoder.pieces[token_id])
    return list(tokenizer.text_of(token_id).encode())
