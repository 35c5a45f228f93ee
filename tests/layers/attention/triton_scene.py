"""Requests in the middle of a step as the Triton attention kernels read them, and the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer, LayerCache, QuantizedKV
from inflight.layers.attention.triton.plan import Ints
from inflight.layers.attention.triton.softmax import AttentionWorkspace, Items, WorkspaceNeed
from inflight.layers.attention.triton.tuning import AttentionTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no bfloat16 products.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SMALL = AttentionTile(rows=16, keys=16, num_warps=4, num_stages=2)
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 8
    has_sinks: bool = False
    softcap: float | None = None

    @property
    def sinks(self) -> Tensor | None:
        """One per head: from negligible to more than all keys together."""
        return torch.linspace(-3, 6, self.num_heads) if self.has_sinks else None

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def layer(self, window: int | None = None) -> AttentionLayer:
        """Return a layer without norms whose rotation changes nothing."""
        cos_sin = torch.zeros(512, self.head_dim, device=DEVICE)
        cos_sin[:, : self.head_dim // 2] = 1
        scale = 1.3 * self.head_dim**-0.5
        return AttentionLayer(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            None,
            None,
            1e-6,
            cos_sin,
            scale,
            window,
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
            softcap=self.softcap,
        )


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., n] -> e4m3 codes [..., n] uint8, their scales [...] and the numbers that they stand for, like x.

    A scale is the smallest power of two for which all numbers fit.
    """
    wide = x.double()
    scales = torch.exp2(torch.log2(wide.abs().amax(-1) / 448).ceil())
    codes = (wide / scales.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales, (codes.double() * scales.unsqueeze(-1)).to(x.dtype)


def quantized_cache(x: Tensor) -> tuple[QuantizedKV, Tensor]:
    """x [num_blocks, 2, num_kv_heads, block_size, head_dim] -> the layer's cache in the middle of a slot, and the
    numbers that it stands for. NaN is nothing: codes and scales that would show in results."""
    written = ~x.isnan().any(-1)
    codes, scales, values = quantized(torch.where(written.unsqueeze(-1), x, 1.0))
    codes = torch.where(written.unsqueeze(-1), codes, 0x7F)
    bits = torch.where(written, scales, NAN).to(torch.bfloat16).movedim(1, -1).contiguous().view(torch.int32)
    num_blocks, size = len(x), codes[0].numel()
    slot = torch.full((num_blocks, size + 4 * bits[0].numel() + 96), 0x7F, dtype=torch.uint8)
    slot[:, 32 : 32 + size] = codes.view(num_blocks, -1)
    slot[:, 32 + size : -64] = bits.view(num_blocks, -1).view(torch.uint8)
    slot = slot.to(DEVICE)
    held = slot[:, 32 : 32 + size].view(codes.shape)
    words = slot[:, 32 + size : -64].view(torch.int32).view(bits.shape[:-1])
    return QuantizedKV(held, words), torch.where(written.unsqueeze(-1), values, NAN)


class Scene:
    """Entry e asks the last counts[e] of its context_lens[e] tokens. Unwritten places of the cache are NaN.

    The first `shared` entries' tables begin with the same `shared_blocks` blocks. If the cache is quantized, `cache` is
    what it stands for.
    """

    def __init__(
        self,
        shape: Shape,
        context_lens: Sequence[int],
        counts: Sequence[int],
        dtype: torch.dtype = torch.float32,
        shared: int = 0,
        shared_blocks: int = 0,
        padding: int = 2,
        is_quantized: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(len(context_lens) + sum(context_lens))
        self.shape, self.dtype = shape, dtype
        self.context_lens = np.array(context_lens, dtype=np.int32)
        self.counts = np.array(counts, dtype=np.int32)
        self.query_starts = np.concatenate(([0], np.cumsum(self.counts))).astype(np.int32)
        num_entries, max_blocks = len(context_lens), -(-max(context_lens) // shape.block_size) + 1
        num_blocks = (num_entries + 2) * max_blocks
        ids = torch.randperm(num_blocks, generator=generator)[: (num_entries + 1) * max_blocks]
        tables = ids.view(num_entries + 1, max_blocks)
        self.rows = torch.randperm(num_entries + 1, generator=generator)[:num_entries].int().numpy()
        for row in self.rows[1:shared]:
            tables[row, :shared_blocks] = tables[self.rows[0], :shared_blocks]
        self.tables = tables.int()

        num_tokens = int(self.query_starts[-1])
        self.qkv = torch.full((num_tokens + padding, shape.width), NAN, dtype=dtype)
        self.qkv[:num_tokens] = torch.randn(num_tokens, shape.width, generator=generator).to(dtype)
        size = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        content = torch.randn(size, generator=generator).to(dtype)
        self.cache = torch.full(size, NAN, dtype=dtype)
        for entry, (context_len, row) in enumerate(zip(self.context_lens, self.rows, strict=True)):
            positions = torch.arange(int(context_len))
            blocks, places = tables[row, positions // shape.block_size], positions % shape.block_size
            self.cache[blocks, :, :, places] = content[blocks, :, :, places]
            own = positions[-int(self.counts[entry]) :] if self.counts[entry] else positions[:0]
            tokens = slice(self.query_starts[entry], self.query_starts[entry + 1])
            heads = self.qkv[tokens].view(-1, shape.width // shape.head_dim, shape.head_dim)
            kv = heads[:, shape.num_heads :]
            if is_quantized:
                kv.copy_(quantized(kv)[2])
            self.cache[blocks[own], :, :, places[own]] = kv.view(-1, 2, shape.num_kv_heads, shape.head_dim)
        cache: LayerCache = self.cache.to(DEVICE)
        if is_quantized:
            cache, self.cache = quantized_cache(self.cache)
        self.on_device = (self.qkv.to(DEVICE), cache, self.tables.to(DEVICE))

    def workspace(self, max_partials: int = 400, max_counters: int = 16) -> AttentionWorkspace:
        shape = self.shape
        need = WorkspaceNeed(max_partials, max_counters, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        made = AttentionWorkspace.allocate([need], torch.device(DEVICE))
        made.outs.fill_(NAN)
        made.lses.fill_(NAN)
        return made

    def blank(self) -> Tensor:
        """Return an output whose unwritten rows are recognisable."""
        size = (len(self.qkv), self.shape.num_heads * self.shape.head_dim)
        return torch.full(size, 77.0, dtype=self.dtype, device=DEVICE)

    def expected(self, window: int | None = None) -> Tensor:
        """[T, num_heads, head_dim] float64, of the tokens that are no padding."""
        shape = self.shape
        scale = shape.layer().scale
        out = []
        for entry, (context_len, row) in enumerate(zip(self.context_lens, self.rows, strict=True)):
            for token in range(self.query_starts[entry], self.query_starts[entry + 1]):
                position = int(context_len) - int(self.query_starts[entry + 1]) + token
                seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
                blocks = self.tables[row, seen // shape.block_size].long()
                kv = self.cache[
                    blocks, :, :, seen % shape.block_size
                ].double()  # [n, 2, num_kv_heads, head_dim]
                keys, values = kv.repeat_interleave(shape.num_heads // shape.num_kv_heads, 2).unbind(1)
                query = self.qkv[token, : shape.num_heads * shape.head_dim].view(shape.num_heads, -1).double()
                scores = (query * keys).sum(-1) * scale  # [n, num_heads]
                if shape.softcap is not None:
                    scores = shape.softcap * torch.tanh(scores / shape.softcap)
                if shape.sinks is not None:
                    scores = torch.cat((scores, shape.sinks.double()[None]))
                weights = torch.softmax(scores, 0)[: len(seen)]
                out.append((weights.unsqueeze(-1) * values).sum(0))
        return torch.stack(out)

    def check(self, out: Tensor, window: int | None = None) -> None:
        """Every token's result is right, and rows of padding are untouched."""
        expected = self.expected(window)
        got = out[: len(expected)].view(expected.shape).double().cpu()
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[self.dtype])
        assert (out[len(expected) :] == 77.0).all()


def items(table: Ints, max_items: int, programs: int | None = None) -> Items:
    """Items in a larger table, whose rest would lead far out of memory if it was read; a program for each, or fewer."""
    padded = np.full((max_items, table.shape[1]), 1 << 28, dtype=np.int32)
    padded[: len(table)] = table
    count = torch.tensor([len(table)], dtype=torch.int32, device=DEVICE)
    return Items(torch.from_numpy(padded.reshape(-1)).to(DEVICE), count, programs or max_items)
