"""Attention of encoders on a GPU: every mask and tile against float64, with NaN in the memory around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inflight.layers.attention.backend import SequenceLayer
from inflight.layers.attention.triton.plan import Ints, max_sequence_items, plan_sequences
from inflight.layers.attention.triton.sequences import TritonSequenceAttention, sequence_attention
from inflight.layers.attention.triton.tuning import AttentionTile, SequenceTuning, choose_sequences
from inflight.layers.rotary import Rope
from tests.layers.attention.test_sequences import attend64, positions_of, sequences_of
from tests.layers.attention.triton_scene import DEVICE, DTYPES, NAN, SMALL, TOLERANCE, items

TUNING = SequenceTuning(SMALL)


def attend(
    qkv: Tensor, head_dim: int, window: int | None, lengths: list[int], tuning: SequenceTuning = TUNING
) -> Tensor:
    """Attend with two heads and spare capacity for items, as in a captured graph."""
    table = plan_sequences(np.array(lengths, dtype=np.int32), tuning.tile.rows)
    out = torch.full((len(qkv), 2 * head_dim), 77.0, dtype=qkv.dtype, device=DEVICE)
    layer = SequenceLayer(2, head_dim, 0.3, window)
    sequence_attention(qkv.to(DEVICE), items(table, len(table) + 3), layer, tuning, out)
    return out.cpu()


@pytest.mark.parametrize("tuning", [TUNING, replace(TUNING, mask_all=True)], ids=["tail", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "head_dim"), [(None, 32), (None, 20), (0, 16), (5, 16), (40, 16)])
def test_sequences_of_every_length_match_float64(
    window: int | None, head_dim: int, dtype: torch.dtype, tuning: SequenceTuning
) -> None:
    torch.manual_seed(0)
    lengths, num_tokens = [1, 16, 5, 37, 32, 2], 93
    qkv = torch.randn(num_tokens + 3, 3 * 2 * head_dim).to(dtype)
    qkv[num_tokens:] = NAN  # padding
    expected = attend64(qkv[:num_tokens], 2, 0.3, window, lengths, None)
    actual, tolerance = attend(qkv, head_dim, window, lengths, tuning), TOLERANCE[dtype]
    torch.testing.assert_close(actual[:num_tokens].double(), expected, rtol=tolerance, atol=tolerance)
    assert (actual[num_tokens:] == 77.0).all()


@pytest.mark.parametrize("window", [None, 7])
def test_sequence_has_the_same_bits_in_any_batch(window: int | None) -> None:
    torch.manual_seed(1)
    qkv = torch.randn(70, 3 * 2 * 16)
    qkv[:9] = NAN  # what a neighbour holds reaches nobody
    actual = attend(qkv, 16, window, [9, 40, 21])
    assert torch.equal(actual[9:49], attend(qkv[9:49], 16, window, [40]))
    assert actual[:9].isnan().all()
    assert actual[49:].isfinite().all()


@pytest.mark.parametrize("head_dim", [16, 24])
def test_queries_and_keys_are_rotated(head_dim: int) -> None:
    torch.manual_seed(2)
    lengths, num_heads = [3, 18, 7], 3
    cos_sin = Rope(10_000.0, head_dim).table(20, torch.device("cpu"))
    qkv = torch.randn(sum(lengths), 3 * num_heads * head_dim)
    expected = attend64(qkv, num_heads, 0.3, None, lengths, cos_sin)
    layer, positions = (
        SequenceLayer(num_heads, head_dim, 0.3, None, cos_sin.to(DEVICE)),
        positions_of(lengths),
    )
    attention = TritonSequenceAttention(TUNING)
    actual = attention.attend(qkv.to(DEVICE), layer, sequences_of(lengths), positions.to(DEVICE))
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_items_are_made_once_for_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    planned: list[int] = []

    def plan(lengths: Ints, tile_positions: int) -> Ints:
        planned.append(len(lengths))
        return plan_sequences(lengths, tile_positions)

    monkeypatch.setattr("inflight.layers.attention.triton.sequences.plan_sequences", plan)
    attention = TritonSequenceAttention(choose_sequences(torch.float32, 16, torch.device(DEVICE)))
    for lengths in ([5, 40], [45], []):
        sequences = sequences_of(lengths)
        qkv = torch.randn(sum(lengths), 96)
        expected = attend64(qkv, 2, 0.3, None, lengths, None) if lengths else qkv[:, :32].double()
        for _ in range(2):
            positions = torch.zeros(
                len(qkv), dtype=torch.int64, device=DEVICE
            )  # not read: nothing is rotated
            actual = attention.attend(qkv.to(DEVICE), SequenceLayer(2, 16, 0.3, None), sequences, positions)
            torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert planned == [2, 1, 0]


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


@given(st.lists(st.integers(1, 70), min_size=1, max_size=20), st.integers(0, 40), st.integers(0, 9))
def test_capacity_fits_every_plan(lengths: list[int], more_tokens: int, more_sequences: int) -> None:
    """Steps have fewer tokens and sequences than their shape, or as many."""
    num_tokens = sum(lengths) + more_tokens
    num_sequences = min(len(lengths) + more_sequences, num_tokens)
    num_items = len(plan_sequences(np.array(lengths, dtype=np.int32), 16))
    assert num_items <= max_sequence_items(num_tokens, num_sequences, 16)


def test_capacity_is_no_larger_than_needed() -> None:
    lengths = np.array([17, 1, 33, 1], dtype=np.int32)
    assert len(plan_sequences(lengths, 16)) == max_sequence_items(52, 4, 16)
