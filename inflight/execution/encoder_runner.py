"""Runs batches on an encoder, on a CPU or a GPU: the texts of a step side by side, one vector for each.

Nothing stays between steps. A text cannot be split, so every entry of a batch was admitted in the same step, and all of
its tokens came with it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.attention.sequences import Sequences
from inflight.execution.device import event_on, to_host, wait_for, watched
from inflight.execution.results import StepVectors
from inflight.execution.runner import torch_threads
from inflight.layers.native_kernels import NativeKernels
from inflight.models.encoder import PoolingEncoder, TextBatch
from inflight.scheduling import Batch, Sampled

Longs = NDArray[np.int64]


@dataclass(slots=True)
class EncoderTicket:
    """A launched step. Its vectors are on their way to host memory, and there once `done` has happened."""

    pooled: StepVectors
    done: torch.cuda.Event | None  # None where there is nothing to wait for


class EncoderRunner:
    """Implements `Runner`. On a GPU no part of `launch` waits for the device."""

    def __init__(self, model: PoolingEncoder) -> None:
        # Whether texts are filled up to the longest of their step, as elsewhere: to compare with that.
        self.padded = False
        self._model = model
        self._device = model.encoder.device
        # Compiled kernels have threads of their own, and torch's would only be in their way.
        compiled = isinstance(model.encoder.kernels, NativeKernels)
        self._threads = 1 if compiled else torch.get_num_threads()

    def warm_up(self, max_len: int, max_tokens: int) -> None:
        """Compute the smallest step and the largest, so that kernels are compiled, and memory is found to be enough,
        before anybody waits for it."""
        with watched(self._device), torch.inference_mode():
            for lengths in ([1], [max_len] * (max_tokens // max_len)):
                self._model.vectors(
                    self._upload([array("q", [0]) * length for length in lengths], [0] * len(lengths))
                )
            wait_for(self._device)

    def launch(self, batch: Batch) -> EncoderTicket:
        with watched(self._device), torch_threads(self._threads):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> EncoderTicket:
        admitted = dict(batch.admissions)
        requests = [admitted[row] for row in batch.rows]
        ids, seconds = [request.token_ids for request in requests], [r.second_segment for r in requests]
        if self.padded:
            ids, seconds = _padded(ids, seconds)
        vectors = self._model.vectors(self._upload(ids, seconds))[-len(requests) :]
        pooled = StepVectors(list(range(len(batch))), to_host(vectors))
        return EncoderTicket(pooled, event_on(self._device))

    def _upload(self, ids: list[array[int]], second_segments: list[int]) -> TextBatch:
        """All that the device must know of a step, in one copy."""
        lengths = [len(of_text) for of_text in ids]
        counts = np.array(lengths, dtype=np.int64)
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        token_ids = np.concatenate([np.frombuffer(of_text, dtype=np.int64) for of_text in ids])
        positions = np.arange(len(token_ids)) - np.repeat(starts[:-1], counts)
        parts = [starts, token_ids, positions]
        seconds = np.array(second_segments, dtype=np.int64)
        if self._model.encoder.spec.num_segments > 1 and seconds.any():
            # Of a single text no token is behind the beginning of a second one.
            parts.append(positions >= np.repeat(np.where(seconds > 0, seconds, counts), counts))
        packed = self._to_device(np.concatenate(parts, dtype=np.int64))
        placed = torch.split(packed, [len(part) for part in parts])
        sequences = Sequences(placed[0].int(), lengths, max(lengths))
        return TextBatch(placed[1], placed[2], placed[3] if len(placed) > 3 else None, sequences)

    def _to_device(self, values: Longs) -> Tensor:
        host = torch.from_numpy(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host

    def collect(self, ticket: EncoderTicket) -> Sampled:
        with watched(self._device):
            if ticket.done is not None:
                ticket.done.synchronize()
        result = Sampled([[] for _ in ticket.pooled.entries])
        ticket.pooled.read_into(result)
        return result

    def close(self) -> None:
        if self._device.type == "cuda":
            wait_for(self._device)
            torch.cuda.empty_cache()  # torch keeps what was freed; others may want it


def _padded(ids: list[array[int]], seconds: list[int]) -> tuple[list[array[int]], list[int]]:
    """What fills up the texts, and then the texts. The two do not see each other."""
    longest = max(map(len, ids))
    filling = [array("q", [0]) * (longest - len(of_text)) for of_text in ids if len(of_text) < longest]
    return filling + ids, [0] * len(filling) + seconds
