"""The runner of encoders on a GPU: the host packs and uploads a step, the device replays a CUDA graph."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.attention.triton.plan import SEQUENCE_FIELDS, max_sequence_items, plan_sequences
from inflight.attention.triton.sequences import PlannedSequences, TritonSequenceAttention
from inflight.attention.triton.softmax import Items
from inflight.errors import EngineError
from inflight.execution.encoder_runner import PackedTexts, pack, pack_batch, trial_texts
from inflight.execution.gpu.device import EagerSteps, StepGraphs, event_on, to_host, wait_for, watched
from inflight.execution.gpu.host_step import Layout, put, put_items, staging
from inflight.execution.gpu.shapes import TextBuckets, TextShape
from inflight.execution.results import StepVectors
from inflight.models.encoders.encoder import PoolingEncoder, TextBatch
from inflight.scheduling import Batch, Sampled


class DeviceTexts:
    """A step's texts in device memory. All steps use the same buffers: they run one after another."""

    def __init__(
        self,
        buckets: TextBuckets,
        tile_positions: int,  # positions per attention program
        has_segments: bool,  # whether the model distinguishes the two texts of a pair
        vector_size: int,
        device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._tile_positions = tile_positions
        self._has_segments = has_segments
        self._device = device
        self._layouts: dict[TextShape, Layout] = {}
        size = Layout(self._sizes(buckets.largest)).size
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._vectors = torch.zeros(buckets.largest.num_texts, vector_size, device=device)

    @property
    def shapes_met(self) -> frozenset[TextShape]:
        return frozenset(self._layouts)

    def layout(self, shape: TextShape) -> Layout:
        if shape not in self._layouts:
            self._layouts[shape] = Layout(self._sizes(shape))
        return self._layouts[shape]

    def _sizes(self, shape: TextShape) -> dict[str, int]:
        sizes = {"num_items": 1, "starts": shape.num_texts + 1}
        sizes |= dict.fromkeys(("token_ids", "positions"), shape.num_tokens)
        if self._has_segments:
            sizes["segments"] = shape.num_tokens
        return sizes | {"items": self._max_items(shape) * SEQUENCE_FIELDS}

    def _max_items(self, shape: TextShape) -> int:
        return max_sequence_items(shape.num_tokens, shape.num_texts, self._tile_positions)

    # ---- on the host ----

    def upload(self, texts: PackedTexts) -> TextShape:
        """Upload a step and return its shape."""
        shape = self._buckets.shape(len(texts.token_ids), len(texts.lengths))
        self._send(texts, shape)
        return shape

    def upload_least(self, shape: TextShape) -> None:
        """Upload a step of this shape that is nearly all padding: one text of one token."""
        self._send(pack([array("q", [0])], [0]), shape)

    def _send(self, texts: PackedTexts, shape: TextShape) -> None:
        layout = self.layout(shape)
        held, whole = staging(layout.size, self._device)
        part = layout.on_host(whole)
        # Padding tokens may be any valid token; padding texts have no tokens.
        put(part["token_ids"], texts.token_ids, 0)
        put(part["positions"], texts.positions, 0)
        put(part["starts"], texts.starts, len(texts.token_ids))
        if self._has_segments:
            put(part["segments"], texts.token_ids[:0] if texts.segments is None else texts.segments, 0)
        lengths = np.array(texts.lengths, dtype=np.int32)
        part["num_items"][0] = put_items(part["items"], plan_sequences(lengths, self._tile_positions))
        self._packed[: layout.size].copy_(held, non_blocking=True)

    # ---- on the device ----

    def open(self, shape: TextShape) -> TextBatch:
        """Return the step's texts, padded to the shape."""
        part = self.layout(shape).on_device(self._packed)
        items = Items(part["items"], part["num_items"], programs=self._max_items(shape))
        return TextBatch(
            part["token_ids"],
            part["positions"],
            part["segments"] if self._has_segments else None,
            PlannedSequences(part["starts"], None, items),
        )

    def vectors(self, first: int, end: int) -> Tensor:
        """Return the latest step's vectors of these texts, [end - first, size] float32."""
        return self._vectors[first:end]


@dataclass(frozen=True, slots=True)
class TextStepHandle:
    """A launched step. Its vectors are being copied to host memory, and are there once `done` has happened."""

    pooled: StepVectors
    done: torch.cuda.Event | None  # None where there is nothing to wait for


class GpuEncoderRunner:
    """Implements `TextRunner`. `launch` does not wait for the device.

    With `graphs`, each step shape is captured once and replayed. Without (and on a CPU under Triton's interpreter, as
    in tests) every kernel is launched by itself.
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

    def launch(self, batch: Batch) -> TextStepHandle:
        with watched(self.model.encoder.device):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> TextStepHandle:
        texts = pack_batch(batch, self.padded)
        self.steps.run(self.texts.upload(texts))
        # Copied, because the next step overwrites the buffer.
        vectors = to_host(self.texts.vectors(texts.num_filling, len(texts.lengths)))
        pooled = StepVectors(list(range(len(batch))), vectors)
        return TextStepHandle(pooled, event_on(self.model.encoder.device))

    def _compute(self, shape: TextShape) -> None:
        """Enqueue the device's part of a step."""
        vectors = self.model.vectors(self.texts.open(shape))
        self.texts.vectors(0, shape.num_texts).copy_(vectors)

    def collect(self, handle: TextStepHandle) -> Sampled:
        with watched(self.model.encoder.device):
            if handle.done is not None:
                handle.done.synchronize()
        result = Sampled([[] for _ in handle.pooled.entries])
        handle.pooled.read_into(result)
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
        """Capture these shapes, so that steps need only be replayed."""
        for shape in shapes:
            self.texts.upload_least(shape)
            self.steps.prepare(shape)
        wait_for(self.model.encoder.device)

    def close(self) -> None:
        wait_for(self.model.encoder.device)
        self.steps.clear()
        if self.model.encoder.device.type == "cuda":
            torch.cuda.empty_cache()  # return torch's cached memory to the device
