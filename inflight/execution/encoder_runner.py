"""Batches on an encoder: the texts of a step packed into arrays, and the runner on a CPU. See `gpu/` for GPUs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from inflight.engine.runner import Runner
from inflight.execution.runner import torch_threads
from inflight.execution.step import StepVectors
from inflight.layers.attention.backend import Sequences
from inflight.layers.native_kernels import NativeKernels
from inflight.models.encoders.encoder import PoolingEncoder, TextBatch
from inflight.scheduling.batch import Batch, Sampled

Longs = NDArray[np.int64]


@runtime_checkable
class TextRunner(Runner[Any], Protocol):
    """A runner for encoders."""

    # Whether texts are padded to the longest of their step, as other engines do: for comparisons.
    padded: bool

    def warm_up(self, max_len: int, max_tokens: int) -> None:
        """Compute the smallest step and the largest, so that no request pays the cost of the first steps."""


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """T tokens of B texts. Nothing persists between steps: a text cannot be split, so every entry of a batch was
    admitted in the same step, with all of its tokens."""

    lengths: list[int]  # [B]
    starts: Longs  # [B + 1]
    token_ids: Longs  # [T]
    positions: Longs  # [T] from 0 in each text
    segments: Longs | None  # [T] 0 or 1: which text of a pair the token belongs to; None: all 0
    num_filling: int = 0  # leading texts that only pad the others


def pack_batch(batch: Batch, padded: bool) -> PackedTexts:
    """Pack the texts of a batch. If `padded`, add filler texts as if each were padded to the longest."""
    admitted = dict(batch.admissions)
    requests = [admitted[row] for row in batch.rows]
    ids, seconds = [request.token_ids for request in requests], [r.second_segment for r in requests]
    filling: list[array[int]] = []
    if padded:
        longest = max(map(len, ids))
        filling = [array("q", [0]) * (longest - len(of_text)) for of_text in ids if len(of_text) < longest]
    return pack(filling + ids, [0] * len(filling) + seconds, len(filling))


def pack(ids: Sequence[array[int]], second_segments: Sequence[int], num_filling: int = 0) -> PackedTexts:
    """Pack texts. `second_segments`: where the second text of each pair begins, 0 if there is none."""
    lengths = [len(of_text) for of_text in ids]
    counts = np.array(lengths, dtype=np.int64)
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    token_ids = np.concatenate([np.frombuffer(of_text, dtype=np.int64) for of_text in ids])
    positions = np.arange(len(token_ids)) - np.repeat(starts[:-1], counts)
    segments, seconds = None, np.array(second_segments, dtype=np.int64)
    if seconds.any():
        # A single text ends before its (missing) second segment begins.
        firsts = np.where(seconds > 0, seconds, counts)
        segments = (positions >= np.repeat(firsts, counts)).astype(np.int64)
    return PackedTexts(lengths, starts, token_ids, positions, segments, num_filling)


def trial_texts(max_len: int, max_tokens: int) -> list[PackedTexts]:
    """Return the smallest step and the largest."""
    return [
        pack([array("q", [0]) * length for length in lengths], [0] * len(lengths))
        for lengths in ([1], [max_len] * (max_tokens // max_len))
    ]


class EncoderRunner:
    """Implements `TextRunner`. `launch` computes; its handle is the vectors."""

    def __init__(self, model: PoolingEncoder) -> None:
        self.padded = False
        self._model = model
        # Compiled kernels have their own threads, which torch's would only disturb.
        compiled = isinstance(model.encoder.kernels, NativeKernels)
        self._threads = 1 if compiled else torch.get_num_threads()

    @torch.inference_mode()
    def warm_up(self, max_len: int, max_tokens: int) -> None:
        for texts in trial_texts(max_len, max_tokens):
            self._model.vectors(self._as_tensors(texts))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepVectors:
        with torch_threads(self._threads):
            texts = pack_batch(batch, self.padded)
            vectors = self._model.vectors(self._as_tensors(texts))
        return StepVectors(list(range(len(batch))), vectors[texts.num_filling :])

    def _as_tensors(self, texts: PackedTexts) -> TextBatch:
        segments = None
        if texts.segments is not None and self._model.encoder.spec.num_segments > 1:
            segments = torch.from_numpy(texts.segments)
        return TextBatch(
            torch.from_numpy(texts.token_ids),
            torch.from_numpy(texts.positions),
            segments,
            Sequences(torch.from_numpy(texts.starts).int(), texts.lengths),
        )

    def collect(self, handle: StepVectors) -> Sampled:
        result = Sampled([[] for _ in handle.entries])
        handle.read_into(result)
        return result

    def close(self) -> None:
        """Do nothing: the runner holds nothing."""
