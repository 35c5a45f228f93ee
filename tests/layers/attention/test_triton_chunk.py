from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.layers.attention.triton.chunk import chunk_attention
from inflight.layers.attention.triton.plan import plan_chunks
from inflight.layers.attention.triton.tuning import AttentionTile
from tests.layers.attention.triton_scene import DEVICE, DTYPES, Scene, Shape, items

TILE = AttentionTile(rows=32, keys=16, num_warps=4, num_stages=2)
WHOLE_TILES = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (9, 0)


def attend(
    scene: Scene,
    extra_items: int,
    window: int | None = None,
    descriptors: bool = False,
    tile: AttentionTile = TILE,
    has_kv: bool = True,
) -> torch.Tensor:
    positions = tile.rows * scene.shape.num_kv_heads // scene.shape.num_heads
    plan = plan_chunks(
        scene.query_starts, scene.context_lens, scene.rows, positions, extra_items, tile.keys, tile.keys
    )
    workspace, out = scene.workspace(plan.num_partials + 1, plan.num_counters + 1), scene.blank()
    work = items(plan.items, len(plan.items) + 3)
    layer = replace(scene.shape.layer(window), has_kv=has_kv)
    qkv, cache, tables = scene.on_device
    if not has_kv:
        qkv = qkv[:, : layer.num_heads * layer.head_dim].contiguous()
    chunk_attention(qkv, cache, tables, work, workspace, layer, tile, descriptors, False, out)
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(2, 2, 64, 8), (4, 2, 128, 16), (3, 1, 80, 8), (8, 2, 64, 16), (7, 1, 80, 16)],
)
@pytest.mark.parametrize("extra_items", [0, 7])
def test_chunks_match_float64(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, extra_items: int
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, block_size)
    scene = Scene(shape, [2, 40, 61, 17], [2, 40, 23, 1])
    scene.check(attend(scene, extra_items))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("extra_items", [0, 7])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_chunks_that_find_all_keys_in_the_cache_match_float64(
    window: int | None, extra_items: int, is_quantized: bool
) -> None:
    scene = Scene(Shape(4, 2, 64, 8), [2, 40, 61, 17], [2, 40, 23, 1], is_quantized=is_quantized)
    scene.check(attend(scene, extra_items, window, has_kv=False), window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_match_float64_in_every_dtype(dtype: torch.dtype) -> None:
    scene = Scene(Shape(4, 2, 128, 16), [2, 40, 61, 17], [2, 40, 23, 1], dtype)
    scene.check(attend(scene, 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (None, 2.0)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 128), (3, 1, 80)])
def test_chunks_over_quantized_keys_match_float64(
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, 16, softcap=softcap)
    scene = Scene(shape, [2, 40, 61, 17], [2, 40, 23, 1], dtype, is_quantized=True)
    scene.check(attend(scene, 7, window), window)


@pytest.mark.parametrize(("window", "extra_items"), [(1, 7), (7, 0), (30, 7), (100, 7)])
def test_windows_match_float64(window: int, extra_items: int) -> None:
    scene = Scene(Shape(), [50, 67, 9], [50, 20, 3])
    scene.check(attend(scene, extra_items, window), window)


@pytest.mark.parametrize("extra_items", [0, 7])
@pytest.mark.parametrize(
    ("has_sinks", "softcap", "window"), [(True, None, None), (True, 2.0, 20), (False, 0.5, None)]
)
def test_sinks_and_soft_caps_match_float64(
    has_sinks: bool, softcap: float | None, window: int | None, extra_items: int
) -> None:
    scene = Scene(Shape(6, 2, 64, 8, has_sinks, softcap), [50, 67, 9], [50, 20, 3])
    scene.check(attend(scene, extra_items, window), window)


@pytest.mark.skipif(not WHOLE_TILES, reason="the device does not copy whole tiles")
def test_chunks_fetched_by_descriptors_match_float64() -> None:
    scene = Scene(Shape(4, 2, 64, 8), [90, 70], [90, 41], torch.float16)
    scene.check(attend(scene, 0, descriptors=True))


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=3),
    st.integers(0, 8),
    st.sampled_from([None, 4, 25]),
    st.sampled_from([16, 32]),
)
def test_any_chunks_match_float64_under_any_split(
    entries: list[tuple[int, int]], extra_items: int, window: int | None, keys: int
) -> None:
    scene = Scene(Shape(2, 1, 64, 16), [sum(entry) for entry in entries], [count for count, _ in entries])
    scene.check(attend(scene, extra_items, window, tile=replace(TILE, keys=keys)), window)


def test_no_items_write_nothing() -> None:
    scene = Scene(Shape(), [5], [5])
    work, out, layer = items(np.empty((0, 11), dtype=np.int32), 4), scene.blank(), scene.shape.layer()
    chunk_attention(*scene.on_device, work, scene.workspace(), layer, TILE, False, False, out)
    assert (out == 77.0).all()
