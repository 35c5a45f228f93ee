"""The runner of encoders on a GPU: the host packs and uploads a step, the device replays a CUDA graph."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from inflight.errors import EngineError
from inflight.execution.encoder_runner import PackedTexts, pack, pack_batch, trial_texts
from inflight.execution.gpu.device import EagerSteps, StepGraphs, event_on, to_host, wait_for, watched
from inflight.execution.gpu.parts import PackedUpload, Section, put, put_items
from inflight.execution.gpu.shapes import TextBuckets, TextShape
from inflight.execution.step import StepVectors
from inflight.layers.attention.triton.plan import SEQUENCE_FIELDS, max_sequence_items, plan_sequences
from inflight.layers.attention.triton.sequences import PlannedSequences, TritonSequenceAttention
from inflight.layers.attention.triton.softmax import Items
from inflight.models.encoders.encoder import PoolingEncoder, TextBatch
from inflight.scheduling.batch import Batch, Sampled


@dataclass(frozen=True, slots=True)
class TextStepHandle:
    """A launched step. Its vectors are being copied to host memory, and are there once `done` has happened."""

    pooled: StepVectors
    done: torch.cuda.Event | None  # None where there is nothing to wait for


class GpuEncoderRunner:
    """Implements `TextRunner`. `launch` does not wait for the device.

    With `graphs`, each step shape is captured once and replayed. Without (and on a CPU under Triton's interpreter, as
    in tests) every kernel is launched by itself. All steps use the same buffers: they run one after another.
    """

    def __init__(self, model: PoolingEncoder, max_rows: int, max_tokens: int, graphs: bool = True) -> None:
        encoder, device = model.encoder, model.encoder.device
        if not isinstance(encoder.attention, TritonSequenceAttention):
            raise EngineError(f"GpuEncoderRunner cannot plan for {type(encoder.attention).__name__}")
        self.padded = False
        self.model = model
        self.buckets = TextBuckets(max_rows, max_tokens)
        self._tile_positions = encoder.attention.tuning.tile.rows  # positions per attention program
        # Whether the model distinguishes the two texts of a pair.
        self._has_segments = encoder.spec.num_segments > 1
        largest = self.buckets.largest
        self.upload: PackedUpload[TextShape] = PackedUpload(self._sections, [largest], device)
        # Of the latest step's texts.
        self.vectors = torch.zeros(largest.num_texts, model.head.size, device=device)
        self.steps: StepGraphs[TextShape, None] | EagerSteps[TextShape, None]
        self.steps = StepGraphs(self._compute) if graphs else EagerSteps(self._compute)

    # ---- a step ----

    def launch(self, batch: Batch) -> TextStepHandle:
        with watched(self.model.encoder.device):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> TextStepHandle:
        texts = pack_batch(batch, self.padded)
        self._run(texts)
        # Copied, because the next step overwrites the buffer.
        vectors = to_host(self.vectors[texts.num_filling : len(texts.lengths)])
        pooled = StepVectors(list(range(len(batch))), vectors)
        return TextStepHandle(pooled, event_on(self.model.encoder.device))

    def _run(self, texts: PackedTexts) -> None:
        shape = self.buckets.shape(len(texts.token_ids), len(texts.lengths))
        self._send(texts, shape)
        self.steps.run(shape)

    def collect(self, handle: TextStepHandle) -> Sampled:
        with watched(self.model.encoder.device):
            if handle.done is not None:
                handle.done.synchronize()
        result = Sampled([[] for _ in handle.pooled.entries])
        handle.pooled.read_into(result)
        return result

    # ---- on the host ----

    def _sections(self, shape: TextShape) -> dict[str, Section]:
        # Padding tokens may be any valid token.
        names = ("token_ids", "positions", "segments") if self._has_segments else ("token_ids", "positions")
        sections = dict.fromkeys(names, Section(shape.num_tokens))
        sections["starts"] = Section(shape.num_texts + 1)
        return sections | {
            "num_items": Section(1),
            "items": Section(self._max_items(shape) * SEQUENCE_FIELDS),
        }

    def _max_items(self, shape: TextShape) -> int:
        return max_sequence_items(shape.num_tokens, shape.num_texts, self._tile_positions)

    def _send(self, texts: PackedTexts, shape: TextShape) -> None:
        """Upload a step, padded to the shape."""
        pinned, sections = self.upload.stage(self.upload.layout(shape))
        put(sections["token_ids"], texts.token_ids)
        put(sections["positions"], texts.positions)
        sections["starts"][:] = len(texts.token_ids)  # padding texts have no tokens
        put(sections["starts"], texts.starts)
        if self._has_segments and texts.segments is not None:
            put(sections["segments"], texts.segments)
        lengths = np.array(texts.lengths, dtype=np.int32)
        items = plan_sequences(lengths, self._tile_positions)
        put_items(sections["items"], sections["num_items"], items)
        self.upload.send(pinned)

    # ---- on the device ----

    def _compute(self, shape: TextShape) -> None:
        """Enqueue the device's part of a step."""
        sections = self.upload.layout(shape).on_device
        items = Items(sections["items"], sections["num_items"], programs=self._max_items(shape))
        texts = TextBatch(
            sections["token_ids"],
            sections["positions"],
            sections.get("segments"),
            PlannedSequences(sections["starts"], None, items),
        )
        self.vectors[: shape.num_texts].copy_(self.model.vectors(texts))

    # ---- before the first step ----

    @torch.inference_mode()
    def warm_up(self, max_len: int, max_tokens: int) -> None:
        with watched(self.model.encoder.device):
            for texts in trial_texts(max_len, max_tokens):
                self._run(texts)
            wait_for(self.model.encoder.device)

    @torch.inference_mode()
    def prepare(self, shapes: Collection[TextShape]) -> None:
        """Capture these shapes, so that steps need only be replayed."""
        for shape in shapes:
            self._send(pack([array("q", [0])], [0]), shape)  # one text of one token: nearly all is padding
            self.steps.prepare(shape)
        wait_for(self.model.encoder.device)

    def close(self) -> None:
        wait_for(self.model.encoder.device)
        self.steps.clear()
        if self.model.encoder.device.type == "cuda":
            torch.cuda.empty_cache()  # return torch's cached memory to the device
