"""The texts of a step of an encoder, side by side in arrays: what its runners on a CPU and on a GPU share."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from inflight.engine.runner import Runner
from inflight.scheduling import Batch

Longs = NDArray[np.int64]


@runtime_checkable
class TextRunner(Runner[Any], Protocol):
    """A runner of encoders."""

    # Whether texts are filled up to the longest of their step, as elsewhere: to compare with that.
    padded: bool

    def warm_up(self, max_len: int, max_tokens: int) -> None:
        """Compute the smallest step and the largest, so that nobody waits for what only the first ones pay."""


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """T tokens of B texts. Nothing stays between steps: a text cannot be split, so every entry of a batch was admitted
    in the same step, and all of its tokens came with it."""

    lengths: list[int]  # [B]
    starts: Longs  # [B + 1]
    token_ids: Longs  # [T]
    positions: Longs  # [T] from 0 in each text
    segments: Longs | None  # [T] which of two texts of a pair a token is in; None: all are in the first
    num_filling: int = 0  # texts, the first ones, that belong to nobody


def pack_batch(batch: Batch, padded: bool) -> PackedTexts:
    """`padded`: filled up to the longest, by texts that the others do not see."""
    admitted = dict(batch.admissions)
    requests = [admitted[row] for row in batch.rows]
    ids, seconds = [request.token_ids for request in requests], [r.second_segment for r in requests]
    filling: list[array[int]] = []
    if padded:
        longest = max(map(len, ids))
        filling = [array("q", [0]) * (longest - len(of_text)) for of_text in ids if len(of_text) < longest]
    return pack(filling + ids, [0] * len(filling) + seconds, len(filling))


def pack(ids: Sequence[array[int]], second_segments: Sequence[int], num_filling: int = 0) -> PackedTexts:
    """`second_segments`: where the second texts of pairs begin, 0 if there is none."""
    lengths = [len(of_text) for of_text in ids]
    counts = np.array(lengths, dtype=np.int64)
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    token_ids = np.concatenate([np.frombuffer(of_text, dtype=np.int64) for of_text in ids])
    positions = np.arange(len(token_ids)) - np.repeat(starts[:-1], counts)
    segments, seconds = None, np.array(second_segments, dtype=np.int64)
    if seconds.any():
        # Of a single text no token is behind the beginning of a second one.
        firsts = np.where(seconds > 0, seconds, counts)
        segments = (positions >= np.repeat(firsts, counts)).astype(np.int64)
    return PackedTexts(lengths, starts, token_ids, positions, segments, num_filling)


def trial_texts(max_len: int, max_tokens: int) -> list[PackedTexts]:
    """The smallest step and the largest."""
    return [
        pack([array("q", [0]) * length for length in lengths], [0] * len(lengths))
        for lengths in ([1], [max_len] * (max_tokens // max_len))
    ]
