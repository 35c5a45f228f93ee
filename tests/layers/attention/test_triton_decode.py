from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.layers.attention.triton.decode import decode_attention, prefix_attention
from inflight.layers.attention.triton.plan import find_groups, plan_decode, plan_prefix
from inflight.layers.attention.triton.tuning import AttentionTile
from tests.layers.attention.triton_scene import (
    DEVICE,
    DTYPES,
    SMALL,
    Scene,
    Shape,
    items,
    quantized,
    quantized_cache,
)

PREFIX = AttentionTile(rows=32, keys=16, num_warps=4, num_stages=2)
CODES = AttentionTile(rows=8, keys=32, num_warps=1, num_stages=2, merged=1024, codes=True)
needs_fp8 = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="the device has no fp8"
)


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


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, True), (20, None, False), (None, 2.0, False)]
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "keys", "num_warps"),
    [
        (4, 2, 128, 16, 32, 1),
        (3, 1, 80, 8, 64, 4),
        (16, 1, 64, 64, 32, 2),  # blocks longer than a tile
        (2, 2, 96, 6, 32, 1),  # tiles do not begin with a block
    ],
)
def test_decodes_of_codes_match_float64(
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    keys: int,
    num_warps: int,
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, block_size, has_sinks, softcap)
    scene = Scene(shape, [1, 47, 16, 33, 100], [1] * 5, dtype, is_quantized=True)
    rows = max(8, num_heads // num_kv_heads)
    tile = replace(CODES, rows=rows, keys=keys, num_warps=num_warps)
    scene.check(decode(scene, 9, window, tile), window)


@needs_fp8
@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=4),
    st.integers(0, 8),
    st.sampled_from([None, 3, 30]),
    st.sampled_from([16, 32, 64]),
)
def test_codes_of_any_contexts_match_float64_under_any_split(
    context_lens: list[int], extra_items: int, window: int | None, keys: int
) -> None:
    scene = Scene(
        Shape(2, 1, 64, 16), context_lens, [1] * len(context_lens), torch.float16, is_quantized=True
    )
    scene.check(decode(scene, extra_items, window, replace(CODES, keys=keys)), window)


def attend_to_codes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, infinite: int = 0
) -> torch.Tensor:
    """Attend with one query [64] to quantized keys and values [n, 64]. `infinite` bits are set in a word of scales."""
    num_keys, shape = len(keys), Shape(1, 1, 64, 16)
    num_blocks = -(-num_keys // 16)
    content = torch.full((2, num_blocks * 16, 64), float("nan"), dtype=query.dtype)
    content[:, :num_keys] = torch.stack((keys, values))
    cache, _ = quantized_cache(content.view(2, num_blocks, 1, 16, 64).transpose(0, 1))
    cache.scales[1, 0, 3] |= infinite
    lengths = np.array([num_keys], dtype=np.int32)
    plan = plan_decode(lengths, np.zeros(1, dtype=np.int32), None, 0, 1, CODES.keys, num_keys)
    tables = torch.arange(num_blocks, dtype=torch.int32, device=DEVICE).unsqueeze(0)
    out = torch.empty(1, 64, dtype=query.dtype, device=DEVICE)
    decode_attention(
        query.repeat(1, 3).to(DEVICE),
        cache,
        tables,
        items(plan.items, 1),
        Scene(shape, [1], [1]).workspace(),
        replace(shape.layer(), scale=1.0),
        CODES,
        False,
        out,
    )
    return out[0].cpu().double()


@needs_fp8
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2.0**14), (torch.bfloat16, 2.0**30)])
def test_large_values_with_small_weights_leave_precision_to_others(dtype: torch.dtype, large: float) -> None:
    query, keys, values = torch.ones(64), torch.ones(40, 64), torch.ones(40, 64)
    keys[::2] = 0.25  # a score of 16, which is 48 less than that of the others
    values[::2] = large
    values[1::4] = 2.0
    out = attend_to_codes(query.to(dtype), keys.to(dtype), values.to(dtype))
    weights = torch.softmax(keys.double().sum(1), 0)
    expected = (weights[:, None] * values.double()).sum(0)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=0)


@needs_fp8
@pytest.mark.parametrize("exponent", [-100, -20, 0, 40])
def test_queries_of_any_magnitude_match_float64(exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent)
    query, keys = (torch.randn(*size, generator=generator).bfloat16() for size in ((64,), (40, 64)))
    values = torch.linspace(1, 3, 40)[:, None].expand(40, 64).bfloat16()
    out = attend_to_codes(query * 2.0**exponent, keys * 2.0**-exponent, values)
    keys, values = quantized(keys)[2], quantized(values)[2]
    weights = torch.softmax((keys.double() * query.double()).sum(1), 0)
    torch.testing.assert_close(out, (weights[:, None] * values.double()).sum(0), rtol=1e-2, atol=0)


@needs_fp8
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("infinite", [0x7F80, 0x7F80 << 16])
def test_infinite_scales_show_in_results_of_codes(infinite: int) -> None:
    out = attend_to_codes(
        torch.ones(64).half(), torch.ones(40, 64).half(), torch.ones(40, 64).half(), infinite
    )
    assert not out.isfinite().any()


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


@pytest.mark.parametrize(
    ("has_sinks", "is_quantized", "tile"),
    [(False, False, SMALL), (True, False, SMALL), (False, True, SMALL), (True, True, CODES)],
)
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
    tile: AttentionTile,
    extra_items: int,
    window: int | None,
    programs: int,
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, 8, has_sinks)
    context_lens = [49, 55, 100, 62, 70, 90, 3]
    dtype = torch.float16 if tile.codes else torch.float32
    scene = Scene(shape, context_lens, [1] * 7, dtype, shared=6, shared_blocks=6, is_quantized=is_quantized)
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
    decode_attention(*scene.on_device, work, workspace, layer, tile, False, out)
    scene.check(out, window)
    assert not workspace.counters.any()
