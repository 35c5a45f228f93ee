"""Attention within sequences that lie side by side, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.attention.sequences import Sequences, TorchSequenceAttention
from inflight.layers.rotary import Rope
from inflight.layers.torch_kernels import TorchKernels


def sequences_of(lengths: list[int]) -> Sequences:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Sequences(starts, lengths, max(lengths, default=0))


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def attend64(
    qkv: Tensor, num_heads: int, scale: float, window: int | None, lengths: list[int], cos_sin: Tensor | None
) -> Tensor:
    """One query at a time."""
    heads = qkv.double().view(len(qkv), 3, num_heads, -1)
    query, key, value = heads.unbind(1)
    if cos_sin is not None:
        half = cos_sin.shape[1] // 2
        table = cos_sin.double()[positions_of(lengths)].unsqueeze(1)
        cos, sin = table[..., :half], table[..., half:]
        query, key = (
            torch.cat(
                (
                    x[..., :half] * cos - x[..., half:] * sin,
                    x[..., half:] * cos + x[..., :half] * sin,
                ),
                -1,
            )
            for x in (query, key)
        )
    out, first = torch.empty_like(query), 0
    for length in lengths:
        for i in range(length):
            low = first if window is None else max(first, first + i - window)
            high = first + length if window is None else min(first + length, first + i + window + 1)
            weights = torch.softmax((query[first + i] * key[low:high]).sum(-1) * scale, 0)  # [n, num_heads]
            out[first + i] = (weights.unsqueeze(-1) * value[low:high]).sum(0)
        first += length
    return out.reshape(len(qkv), -1)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3, 64])
def test_sequences_of_every_length(window: int | None, rotated: bool) -> None:
    torch.manual_seed(0)
    lengths, num_heads, head_dim = [1, 5, 17, 2, 33], 3, 16
    qkv = torch.randn(sum(lengths), 3 * num_heads * head_dim)
    cos_sin = Rope(10_000.0, head_dim).table(64, torch.device("cpu")) if rotated else None
    expected = attend64(qkv, num_heads, 0.3, window, lengths, cos_sin)
    rotary = None if cos_sin is None else (cos_sin, positions_of(lengths))
    attention = TorchSequenceAttention(TorchKernels())
    found = attention.attend(qkv, num_heads, head_dim, 0.3, window, sequences_of(lengths), rotary)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
