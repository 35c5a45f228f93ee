"""Snapshots of recurrent states in blocks of the KV memory."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.layers.recurrent import DeltaNetShape, allocate_states, blocks_per_snapshot


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_restored_states_are_those_that_were_saved(
    sizes: list[int], num_lanes: int, part: int, random: Random
) -> None:
    num_blocks = blocks_per_snapshot(sizes, num_lanes, 4 * part)
    caches = [torch.zeros(2 * num_blocks, part) for _ in range(num_lanes)]
    states = allocate_states(sizes, caches, max_rows=3)
    for layer in states:
        layer.rows.copy_(torch.randn(layer.rows.shape))
    ids = random.sample(range(2 * num_blocks), 2 * num_blocks)
    snapshots = ids[:num_blocks], ids[num_blocks:]
    for row, block_ids in enumerate(snapshots):
        for layer in states:
            layer.save(row, block_ids)
    for layer in states:
        expected = layer.rows.clone()
        layer.rows[2] = 0
        for row, block_ids in enumerate(snapshots):
            layer.restore(2, block_ids)
            assert torch.equal(layer.rows[2], expected[row])


def test_snapshot_has_no_block_to_spare() -> None:
    assert blocks_per_snapshot([10, 20, 10], 2, 40) == 2  # 20 values in each lane, 10 in a part
    assert blocks_per_snapshot([10, 21, 10], 2, 40) == 3
    assert blocks_per_snapshot([], 2, 40) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_may_have_any_type_and_shape(dtype: torch.dtype) -> None:
    caches = [torch.zeros(4, 2, 2, 4, 2, dtype=dtype)]
    (layer,) = allocate_states([20], caches, max_rows=1)
    layer.rows.copy_(torch.randn(1, 20))
    layer.save(0, [3, 1])
    expected = layer.rows.clone()
    layer.rows.zero_()
    layer.restore(0, [3, 1])
    assert torch.equal(layer.rows, expected)


def test_shape_counts_what_a_token_is_projected_to() -> None:
    shape = DeltaNetShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, kernel=4)
    assert shape.conv_size == 2 * 16 + 64
    assert shape.projected_size == 96 + 64 + 8
    assert shape.state_size == 3 * 96 + 4 * 8 * 16
