"""Attention within sequences that lie side by side, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.attention.backend import SequenceAttention, SequenceLayer, Sequences
from inflight.layers.attention.cpu import NativeSequenceAttention, TorchSequenceAttention
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.rotary import Rope
from inflight.layers.torch_kernels import TorchKernels


def native() -> NativeSequenceAttention:
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    return NativeSequenceAttention(library, NativeKernels(library))


@pytest.fixture(params=["native", "torch"])
def attention(request: pytest.FixtureRequest) -> SequenceAttention:
    return native() if request.param == "native" else TorchSequenceAttention(TorchKernels())


def sequences_of(lengths: list[int]) -> Sequences:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Sequences(starts, lengths)


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
@pytest.mark.parametrize("head_dim", [16, 10, 40])
def test_sequences_of_every_length_match_float64(
    attention: SequenceAttention, window: int | None, rotated: bool, head_dim: int
) -> None:
    torch.manual_seed(0)
    lengths, num_heads = [1, 5, 17, 2, 33], 3
    qkv = torch.randn(sum(lengths), 3 * num_heads * head_dim)
    cos_sin = Rope(10_000.0, head_dim).table(64, torch.device("cpu")) if rotated else None
    expected = attend64(qkv, num_heads, 0.3, window, lengths, cos_sin)
    layer = SequenceLayer(num_heads, head_dim, 0.3, window, cos_sin)
    actual = attention.attend(qkv.clone(), layer, sequences_of(lengths), positions_of(lengths))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_sequence_longer_than_one_unit_of_work_matches_torch(window: int | None) -> None:
    torch.manual_seed(1)
    lengths, num_heads, head_dim = [3, 1100], 2, 8
    qkv = torch.randn(sum(lengths), 3 * num_heads * head_dim)
    inputs = SequenceLayer(num_heads, head_dim, 0.5, window), sequences_of(lengths), positions_of(lengths)
    expected = TorchSequenceAttention(TorchKernels()).attend(qkv.double(), *inputs)
    actual = native().attend(qkv, *inputs)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 9])
def test_sequence_has_the_same_bits_in_any_batch(window: int | None) -> None:
    torch.manual_seed(2)
    lengths, num_heads, head_dim = [40, 1, 23, 130, 7], 2, 24
    texts = [torch.randn(length, 3 * num_heads * head_dim) for length in lengths]
    attention = native()

    def attend(*some: int) -> list[Tensor]:
        sizes = [lengths[i] for i in some]
        together = torch.cat([texts[i] for i in some])
        layer = SequenceLayer(num_heads, head_dim, 0.2, window)
        out = attention.attend(together, layer, sequences_of(sizes), positions_of(sizes))
        return list(torch.split(out, sizes))

    alone = [attend(i)[0] for i in range(len(lengths))]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [3, 3, 1], [2, 0]):
        for i, actual in zip(order, attend(*order), strict=True):
            assert torch.equal(actual, alone[i])


def test_large_scores_do_not_overflow(attention: SequenceAttention) -> None:
    qkv = torch.full((20, 3 * 4), 100.0)
    actual = attention.attend(qkv, SequenceLayer(1, 4, 1.0, None), sequences_of([20]), positions_of([20]))
    torch.testing.assert_close(actual, torch.full((20, 4), 100.0))


def test_mismatched_tensors_are_rejected() -> None:
    qkv, fine = torch.zeros(8, 3 * 2 * 4), sequences_of([5, 3])
    attention, layer, positions = native(), SequenceLayer(2, 4, 1.0, None), positions_of([5, 3])
    with pytest.raises(ConfigError, match=r"qkv is \[8, 24\]"):
        attention.attend(qkv, replace(layer, num_heads=3), fine, positions)
    with pytest.raises(ConfigError, match="rise from 0 to 8 tokens"):
        attention.attend(qkv, layer, sequences_of([5, 4]), positions)
    with pytest.raises(ConfigError, match="must be int32"):
        attention.attend(qkv, layer, Sequences(fine.starts.long(), fine.lengths), positions)
    with pytest.raises(ConfigError, match="cannot rotate"):
        attention.attend(qkv, replace(layer, cos_sin=torch.zeros(9, 6)), fine, positions)
