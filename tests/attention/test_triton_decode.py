from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.attention.triton.decode import decode_attention, prefix_attention
from inflight.attention.triton.plan import find_groups, plan_decode, plan_prefix
from inflight.attention.triton.tuning import AttentionTile
from tests.attention.triton_scene import DTYPES, SMALL, Scene, Shape, items

PREFIX = AttentionTile(rows=32, keys=16, num_warps=4, num_stages=2)


def decode(
    scene: Scene, extra_items: int, window: int | None = None, tile: AttentionTile = SMALL
) -> torch.Tensor:
    plan = plan_decode(scene.context_lens, scene.rows, None, extra_items, 3, tile.keys, tile.keys)
    out, workspace, work = scene.blank(), scene.workspace(), items(plan.items, len(plan.items) + 3)
    layer = scene.shape.layer(window)
    decode_attention(*scene.on_device, work, workspace, layer, tile, False, out)
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(2, 2, 64, 8), (4, 2, 128, 16), (3, 1, 80, 8), (8, 2, 64, 16), (7, 1, 80, 16)],
)
@pytest.mark.parametrize("extra_items", [0, 9])
def test_decodes_match_float64(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, extra_items: int
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, block_size)
    scene = Scene(shape, [1, 47, 16, 33, 100], [1] * 5)
    scene.check(decode(scene, extra_items))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_match_float64_in_every_dtype(dtype: torch.dtype) -> None:
    scene = Scene(Shape(4, 2, 128, 16), [1, 47, 16, 33, 100], [1] * 5, dtype)
    scene.check(decode(scene, 9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 2.0)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 128), (3, 1, 80)])
def test_decodes_of_quantized_keys_match_float64(
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, 16, softcap=softcap)
    scene = Scene(shape, [1, 47, 16, 33, 100], [1] * 5, dtype, is_quantized=True)
    scene.check(decode(scene, 9, window), window)


@pytest.mark.parametrize(("window", "extra_items"), [(1, 9), (5, 0), (16, 9), (40, 9), (200, 9)])
def test_windows_match_float64(window: int, extra_items: int) -> None:
    scene = Scene(Shape(), [1, 47, 16, 33, 100], [1] * 5)
    scene.check(decode(scene, extra_items, window), window)


@pytest.mark.parametrize("extra_items", [0, 9])
@pytest.mark.parametrize(
    ("has_sinks", "softcap", "window"), [(True, None, None), (True, 2.0, 20), (False, 0.5, None)]
)
def test_sinks_and_soft_caps_match_float64(
    has_sinks: bool, softcap: float | None, window: int | None, extra_items: int
) -> None:
    shape = Shape(6, 2, 64, 8, has_sinks, softcap)
    scene = Scene(shape, [1, 47, 16, 33, 100], [1] * 5)
    scene.check(decode(scene, extra_items, window), window)


@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=4),
    st.integers(0, 8),
    st.sampled_from([None, 3, 30]),
    st.sampled_from([16, 32]),
)
def test_any_contexts_match_float64_under_any_split(
    context_lens: list[int], extra_items: int, window: int | None, keys: int
) -> None:
    scene = Scene(Shape(2, 1, 64, 16), context_lens, [1] * len(context_lens))
    scene.check(decode(scene, extra_items, window, replace(SMALL, keys=keys)), window)


def test_more_splits_than_are_merged_at_once_match_float64() -> None:
    # 32 query heads on one KV head: four partials at a time.
    scene = Scene(Shape(32, 1, 64, 8), [150], [1])
    scene.check(decode(scene, 100, tile=replace(SMALL, rows=32)))


def test_launch_leaves_the_workspace_ready_for_the_next() -> None:
    scene = Scene(Shape(), [90, 20], [1, 1])
    plan = plan_decode(scene.context_lens, scene.rows, None, 9, 64, 16, 16)
    workspace, work, layer = scene.workspace(), items(plan.items, 20), scene.shape.layer()
    for _ in range(2):
        out = scene.blank()
        decode_attention(*scene.on_device, work, workspace, layer, SMALL, False, out)
        scene.check(out)


def test_no_items_write_nothing() -> None:
    scene = Scene(Shape(), [5], [1])
    work, out, layer = items(np.empty((0, 9), dtype=np.int32), 4), scene.blank(), scene.shape.layer()
    decode_attention(*scene.on_device, work, scene.workspace(), layer, SMALL, False, out)
    assert (out == 77.0).all()


@pytest.mark.parametrize(("has_sinks", "is_quantized"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 80), (14, 2, 64)])
@pytest.mark.parametrize(
    ("window", "extra_items", "programs"), [(None, 0, 12), (None, 0, 1), (50, 6, 12), (10, 6, 1)]
)
def test_shared_prefixes_change_nothing(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_sinks: bool,
    is_quantized: bool,
    extra_items: int,
    window: int | None,
    programs: int,
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, 8, has_sinks)
    context_lens = [49, 55, 100, 62, 70, 90, 3]
    scene = Scene(shape, context_lens, [1] * 7, shared=6, shared_blocks=6, is_quantized=is_quantized)
    num_blocks = (scene.context_lens - 1) // 8
    groups = find_groups(scene.tables.numpy(), scene.rows, num_blocks, 2, 2, 4)
    assert [(group.entries.tolist(), group.num_blocks) for group in groups] == [([0, 1, 2, 3, 4, 5], 6)]
    members_per_tile = PREFIX.rows // (num_heads // num_kv_heads)
    prefix = plan_prefix(groups, scene.rows, 8, members_per_tile, extra_items, 16, 16, 12, 100)
    assert prefix is not None
    plan = plan_decode(scene.context_lens, scene.rows, prefix, extra_items, 64, 16, 16)
    members = items(prefix.members(scene.context_lens, plan), 9).table
    shared, work = items(prefix.items, 12, programs), items(plan.items, 20)
    workspace, out, layer = scene.workspace(), scene.blank(), shape.layer(window)
    prefix_attention(*scene.on_device, shared, members, workspace, layer, PREFIX, False)
    decode_attention(*scene.on_device, work, workspace, layer, SMALL, False, out)
    scene.check(out, window)
    assert not workspace.counters.any()
