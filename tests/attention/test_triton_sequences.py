"""Attention of encoders as the GPU does it: every mask and tile against float64, and whatever lies around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inflight.attention.triton.plan import plan_sequences
from inflight.attention.triton.sequences import PlannedSequences, TritonSequenceAttention
from inflight.attention.triton.tuning import AttentionTile, SequenceTuning, choose_sequences
from inflight.layers.rotary import Rope
from tests.attention.test_sequences import attend64, positions_of, sequences_of
from tests.attention.triton_scene import DEVICE, DTYPES, NAN, SMALL, TOLERANCE, items

TUNING = SequenceTuning(SMALL)


def on_device(lengths: list[int]) -> PlannedSequences:
    """With room for more items, as a captured graph has it."""
    sequences = sequences_of(lengths)
    table = plan_sequences(np.array(lengths, dtype=np.int32), SMALL.rows)
    room = items(table, len(table) + 3)
    return PlannedSequences(sequences.starts.to(DEVICE), lengths, sequences.max_len, room)


@pytest.mark.parametrize("tuning", [TUNING, replace(TUNING, mask_all=True)], ids=["tail", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "head_dim"), [(None, 32), (None, 20), (0, 16), (5, 16), (40, 16)])
def test_sequences_of_every_length(
    window: int | None, head_dim: int, dtype: torch.dtype, tuning: SequenceTuning
) -> None:
    torch.manual_seed(0)
    lengths, num_heads = [1, 16, 5, 37, 32, 2], 2
    qkv = torch.randn(sum(lengths) + 3, 3 * num_heads * head_dim).to(dtype)
    qkv[sum(lengths) :] = NAN  # padding
    expected = attend64(qkv[: sum(lengths)], num_heads, 0.3, window, lengths, None)
    attention = TritonSequenceAttention(tuning)
    found = attention.attend(qkv.to(DEVICE), num_heads, head_dim, 0.3, window, on_device(lengths))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found[: sum(lengths)].double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 7])
def test_a_sequence_is_the_same_bits_among_others(window: int | None) -> None:
    torch.manual_seed(1)
    lengths, num_heads, head_dim = [9, 40, 21], 2, 16
    qkv = torch.randn(sum(lengths), 3 * num_heads * head_dim)
    qkv[:9] = NAN  # what a neighbour holds reaches nobody
    attention = TritonSequenceAttention(TUNING)
    found = attention.attend(qkv.to(DEVICE), num_heads, head_dim, 0.3, window, on_device(lengths))
    alone = attention.attend(qkv[9:49].to(DEVICE), num_heads, head_dim, 0.3, window, on_device([40]))
    assert torch.equal(found[9:49], alone)
    assert found[:9].isnan().all()


@pytest.mark.parametrize("head_dim", [16, 24])
def test_queries_and_keys_are_rotated(head_dim: int) -> None:
    torch.manual_seed(2)
    lengths, num_heads = [3, 18, 7], 3
    cos_sin = Rope(10_000.0, head_dim).table(20, torch.device("cpu"))
    qkv = torch.randn(sum(lengths), 3 * num_heads * head_dim)
    expected = attend64(qkv, num_heads, 0.3, None, lengths, cos_sin)
    rotary = cos_sin.to(DEVICE), positions_of(lengths).to(DEVICE)
    attention = TritonSequenceAttention(TUNING)
    found = attention.attend(qkv.to(DEVICE), num_heads, head_dim, 0.3, None, on_device(lengths), rotary)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_items_are_made_once_for_all_layers_of_a_step() -> None:
    torch.manual_seed(3)
    attention = TritonSequenceAttention(choose_sequences(torch.float32, 16, torch.device(DEVICE)))
    for lengths in ([5, 40], [45], []):
        sequences = sequences_of(lengths)
        qkv = torch.randn(sum(lengths), 96)
        expected = attend64(qkv, 2, 0.3, None, lengths, None) if lengths else qkv[:, :32].double()
        made = []
        for _ in range(2):
            found = attention.attend(qkv.to(DEVICE), 2, 16, 0.3, None, sequences)
            torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)
            made.append(attention._items(sequences, qkv.device))
        assert made[0] is made[1]


def test_tiles_of_the_longest_sequences_come_first() -> None:
    table = plan_sequences(np.array([3, 9, 4, 9], dtype=np.int32), 4)
    assert table.tolist() == [
        *([3, 9, 0], [3, 9, 4], [3, 9, 8]),
        *([16, 9, 0], [16, 9, 4], [16, 9, 8]),
        *([12, 4, 0], [0, 3, 0]),
    ]
    assert plan_sequences(np.array([], dtype=np.int32), 4).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_every_model_has_a_tile(dtype: torch.dtype, head_dim: int) -> None:
    tuning = choose_sequences(dtype, head_dim, torch.device(DEVICE))
    assert isinstance(tuning.tile, AttentionTile)
    assert not tuning.descriptors or head_dim & (head_dim - 1) == 0
