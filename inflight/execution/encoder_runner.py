"""Runs batches on an encoder, on a CPU or a GPU: the texts of a step side by side, one vector for each.

Nothing stays between steps. A text cannot be split, so every entry of a batch was admitted in the same step, and all of
its tokens came with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.attention.sequences import Sequences
from inflight.errors import DeviceLostError
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
        self._model = model
        self._device = model.encoder.device
        # Compiled kernels have threads of their own, and torch's would only be in their way.
        compiled = isinstance(model.encoder.kernels, NativeKernels)
        self._threads = 1 if compiled else torch.get_num_threads()

    def warm_up(self, max_len: int, max_tokens: int) -> None:
        """Compute the smallest step and the largest, so that kernels are compiled, and memory is found to be enough,
        before anybody waits for it."""
        with self._watching_the_device(), torch.inference_mode():
            for lengths in ([1], [max_len] * (max_tokens // max_len)):
                self._model.vectors(
                    self._upload([array("q", [0]) * length for length in lengths], [0] * len(lengths))
                )
            if self._device.type == "cuda":
                torch.cuda.synchronize()

    def launch(self, batch: Batch) -> EncoderTicket:
        with self._watching_the_device(), torch_threads(self._threads):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> EncoderTicket:
        admitted = dict(batch.admissions)
        requests = [admitted[row] for row in batch.rows]
        texts = self._upload(
            [request.token_ids for request in requests], [request.second_segment for request in requests]
        )
        vectors = self._model.vectors(texts)
        on_gpu = self._device.type == "cuda"
        host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=on_gpu)
        host.copy_(vectors, non_blocking=on_gpu)
        done = None
        if on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return EncoderTicket(StepVectors(list(range(len(batch))), host), done)

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
        with self._watching_the_device():
            if ticket.done is not None:
                ticket.done.synchronize()
        result = Sampled([[] for _ in ticket.pooled.entries])
        ticket.pooled.read_into(result)
        return result

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # torch keeps what was freed; others may want it

    @contextmanager
    def _watching_the_device(self) -> Iterator[None]:
        """After some errors (an illegal access, an ECC error) every later call fails too, until the process ends."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)  # every thread has a device of its own: the first, unless told
        try:
            yield
        except RuntimeError as error:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise DeviceLostError(f"the GPU is lost: {str(error).splitlines()[0]}") from error
            raise
