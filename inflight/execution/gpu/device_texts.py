"""One step of an encoder in device memory: the packed upload, its sections as each shape lays them out, the vectors."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from inflight.attention.triton.plan import SEQUENCE_FIELDS, max_sequence_items, plan_sequences
from inflight.attention.triton.sequences import PlannedSequences
from inflight.attention.triton.step import Items
from inflight.execution.gpu.host_step import Layout, put, put_items, staging
from inflight.execution.gpu.text_shapes import TextBuckets, TextShape
from inflight.execution.packed_texts import PackedTexts, pack
from inflight.models.encoders.encoder import TextBatch


class DeviceTexts:
    """Buffers that every step reuses: steps of one device run one after the other."""

    def __init__(
        self,
        buckets: TextBuckets,
        tile_positions: int,  # of a program of attention
        has_segments: bool,  # whether the model tells the two texts of a pair apart
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
        """Tell the device about a step; which shape it has."""
        shape = self._buckets.shape(len(texts.token_ids), len(texts.lengths))
        self._send(texts, shape)
        return shape

    def upload_least(self, shape: TextShape) -> None:
        """A step of this shape that is nearly all padding: one text of one token."""
        self._send(pack([array("q", [0])], [0]), shape)

    def _send(self, texts: PackedTexts, shape: TextShape) -> None:
        layout = self.layout(shape)
        held, whole = staging(layout.size, self._device)
        part = layout.on_host(whole)
        # Tokens that only fill the shape are any that there are. Texts that do have no tokens.
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
        """The step's texts, as many tokens and texts as the shape has."""
        part = self.layout(shape).on_device(self._packed)
        items = Items(part["items"], part["num_items"], programs=self._max_items(shape))
        return TextBatch(
            part["token_ids"],
            part["positions"],
            part["segments"] if self._has_segments else None,
            PlannedSequences(part["starts"], None, items),
        )

    def vectors(self, first: int, end: int) -> Tensor:
        """[end - first, size] float32, of these texts of the latest step."""
        return self._vectors[first:end]
