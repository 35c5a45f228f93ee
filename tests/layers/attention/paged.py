"""Requests with known queries, keys and values, to be attended by any backend under any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kv.layout import LayerKV
from inflight.layers.attention.backend import AttentionInputs, AttentionLayer, KVShape, QuantizedKV
from inflight.layers.attention.cpu import HeadAttention

# One step: (request, first token, number of tokens) for each entry.
Step = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, features] -> query, key and value [T, heads, head_dim], as views."""
        heads = packed.view(len(packed), -1, self.head_dim)
        first_value = self.num_heads + self.num_kv_heads
        return heads[:, : self.num_heads], heads[:, self.num_heads : first_value], heads[:, first_value:]


class Scene:
    """Requests over blocks in random order; row i of the tables is not request i's."""

    def __init__(self, heads: Heads, block_size: int, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.block_size, self.lengths = heads, block_size, lengths
        self.scale = 1.5 * heads.head_dim**-0.5
        self.sinks: Tensor | None = None
        self.softcap: float | None = None
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.qkv = [torch.randn(length, width, generator=generator) for length in lengths]
        per_request = -(-max(lengths) // block_size)
        self.num_blocks = per_request * len(lengths) + 3
        order = torch.randperm(self.num_blocks, generator=generator)[: per_request * len(lengths)]
        self.rows = torch.randperm(len(lengths), generator=generator).tolist()
        self.tables = torch.full((len(lengths), per_request + 2), -1, dtype=torch.int32)
        self.tables[:, :per_request] = order.view(len(lengths), per_request).int()

    def whole(self) -> list[Step]:
        """All prompts in one step."""
        return [[(request, 0, length) for request, length in enumerate(self.lengths)]]

    def chunks(self, size: int) -> list[Step]:
        """All requests side by side, `size` tokens per step; the longer ones go on alone."""
        return [
            [(r, first, min(size, n - first)) for r, n in enumerate(self.lengths) if first < n]
            for first in range(0, max(self.lengths), size)
        ]

    def alone(self) -> list[Step]:
        """One request a step."""
        return [[entry] for entry in self.whole()[0]]

    def run(
        self,
        backend: HeadAttention,
        steps: list[Step],
        window: int | None = None,
        others: Sequence[LayerKV] = (),
        quantized: str | None = None,
    ) -> list[Tensor]:
        """Return each request's attention output, [length, num_heads, head_dim]. The cache starts as NaN. `others` are
        layers that share its memory."""
        heads = self.heads
        layers = [LayerKV(heads.num_kv_heads, heads.head_dim, heads.head_dim, quantized=quantized), *others]
        shape = KVShape.from_layers(layers, self.block_size, torch.float32)
        cache = backend.allocate(shape, self.num_blocks, torch.device("cpu")).layers[0]
        if isinstance(cache, QuantizedKV):
            cache.codes.fill_(-128)
            cache.scales.fill_(-1)  # both halves are NaN
        else:
            cache.fill_(float("nan"))
        layer = self.layer(window)
        out = [torch.zeros(length, heads.num_heads, heads.head_dim) for length in self.lengths]
        for step in steps:
            # Views into one packed tensor, as a decoder hands them over: not contiguous.
            packed = torch.cat([self.qkv[r][first : first + n] for r, first, n in step])
            query, key, value = heads.split(packed)
            attended = backend.attend(query, key, value, layer, cache, self.inputs(step))
            done = 0
            for r, first, n in step:
                out[r][first : first + n] = attended[done : done + n]
                done += n
        return out

    def layer(self, window: int | None = None) -> AttentionLayer:
        heads = self.heads
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
        return AttentionLayer(
            *sizes, None, None, 1e-6, None, self.scale, window, sinks=self.sinks, softcap=self.softcap
        )

    def inputs(self, step: Step) -> AttentionInputs:
        counts = torch.tensor([0] + [n for _, _, n in step])
        slot_mapping, places = [], []
        for r, first, n in step:
            positions = torch.arange(first, first + n)
            blocks = self.tables[self.rows[r]][positions // self.block_size].long()
            places.append(positions)
            slot_mapping.append(blocks * self.block_size + positions % self.block_size)
        ends = [first + n for _, first, n in step]
        return AttentionInputs(
            positions=torch.cat(places),
            query_starts=counts.cumsum(0).int(),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            rows=torch.tensor([self.rows[r] for r, _, _ in step], dtype=torch.int32),
            block_tables=self.tables[None],
            slot_mapping=torch.cat(slot_mapping)[None],
        )
