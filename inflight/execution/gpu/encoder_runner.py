"""Runs batches on an encoder on a GPU: the host packs and uploads, the device replays."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from inflight.attention.triton.sequences import TritonSequenceAttention
from inflight.errors import EngineError
from inflight.execution.device import event_on, to_host, wait_for, watched
from inflight.execution.gpu.device_texts import DeviceTexts
from inflight.execution.gpu.graphs import EagerSteps, StepGraphs
from inflight.execution.gpu.text_shapes import TextBuckets, TextShape
from inflight.execution.packed_texts import pack_batch, trial_texts
from inflight.execution.results import StepVectors
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.scheduling import Batch, Sampled


@dataclass(frozen=True, slots=True)
class TextTicket:
    """A launched step. Its vectors are on their way to host memory, and there once `done` has happened."""

    pooled: StepVectors
    done: torch.cuda.Event | None  # None where there is nothing to wait for


class GpuEncoderRunner:
    """Implements `TextRunner`. No part of `launch` waits for the device.

    With `graphs`, each shape of step is captured once and replayed. Without (and on a CPU under Triton's
    interpreter, where tests run it) every kernel is launched by itself.
    """

    def __init__(self, model: PoolingEncoder, max_rows: int, max_tokens: int, graphs: bool = True) -> None:
        encoder = model.encoder
        if not isinstance(encoder.attention, TritonSequenceAttention):
            raise EngineError(f"GpuEncoderRunner cannot plan for {type(encoder.attention).__name__}")
        self.padded = False
        self.model = model
        self.buckets = TextBuckets(max_rows, max_tokens)
        self.texts = DeviceTexts(
            self.buckets,
            encoder.attention.tuning.tile.rows,
            encoder.spec.num_segments > 1,
            model.head.size,
            encoder.device,
        )
        self.steps: StepGraphs[TextShape, None] | EagerSteps[TextShape, None]
        self.steps = StepGraphs(self._compute) if graphs else EagerSteps(self._compute)

    # ---- a step ----

    def launch(self, batch: Batch) -> TextTicket:
        with watched(self.model.encoder.device):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> TextTicket:
        texts = pack_batch(batch, self.padded)
        self.steps.run(self.texts.upload(texts))
        # A copy of its own: the next step writes its vectors to the same place.
        vectors = to_host(self.texts.vectors(texts.num_filling, len(texts.lengths)))
        pooled = StepVectors(list(range(len(batch))), vectors)
        return TextTicket(pooled, event_on(self.model.encoder.device))

    def _compute(self, shape: TextShape) -> None:
        """The device's part."""
        vectors = self.model.vectors(self.texts.open(shape))
        self.texts.vectors(0, shape.num_texts).copy_(vectors)

    def collect(self, ticket: TextTicket) -> Sampled:
        with watched(self.model.encoder.device):
            if ticket.done is not None:
                ticket.done.synchronize()
        result = Sampled([[] for _ in ticket.pooled.entries])
        ticket.pooled.read_into(result)
        return result

    # ---- before the first step ----

    @torch.inference_mode()
    def warm_up(self, max_len: int, max_tokens: int) -> None:
        with watched(self.model.encoder.device):
            for texts in trial_texts(max_len, max_tokens):
                self.steps.run(self.texts.upload(texts))
            wait_for(self.model.encoder.device)

    @torch.inference_mode()
    def prepare(self, shapes: Collection[TextShape]) -> None:
        """See to it that steps of these shapes need only be replayed."""
        for shape in shapes:
            self.texts.upload_least(shape)
            self.steps.prepare(shape)
        wait_for(self.model.encoder.device)

    def close(self) -> None:
        wait_for(self.model.encoder.device)
        self.steps.clear()
        if self.model.encoder.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what was freed; others may want it
