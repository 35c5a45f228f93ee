"""Runs batches on an encoder on a CPU: the texts of a step side by side, one vector for each. See `gpu/` for GPUs."""

from __future__ import annotations

import torch

from inflight.attention.sequences import Sequences
from inflight.execution.packed_texts import PackedTexts, pack_batch, trial_texts
from inflight.execution.results import StepVectors
from inflight.execution.threads import torch_threads
from inflight.layers.native_kernels import NativeKernels
from inflight.models.encoders.encoder import PoolingEncoder, TextBatch
from inflight.scheduling import Batch, Sampled


class EncoderRunner:
    """Implements `TextRunner`. Computes in `launch`; a ticket is the vectors."""

    def __init__(self, model: PoolingEncoder) -> None:
        self.padded = False
        self._model = model
        # Compiled kernels have threads of their own, and torch's would only be in their way.
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

    def collect(self, ticket: StepVectors) -> Sampled:
        result = Sampled([[] for _ in ticket.entries])
        ticket.read_into(result)
        return result

    def close(self) -> None:
        """Nothing is held."""
