"""Steps of decodes alone, whose kernels ready heads themselves, against those that find them ready."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from inflight.attention.layer import AttentionLayer
from inflight.attention.triton.backend import TritonAttention, TritonStep
from inflight.attention.triton.decode import decode_attention
from inflight.attention.triton.plan import PrefixPlan, find_groups, plan_decode, plan_prefix
from inflight.attention.triton.prefix import prefix_attention
from inflight.attention.triton.rope_write import rope_write
from inflight.attention.triton.tuning import Tile, Tuning
from inflight.attention.triton.workspace import Workspace
from tests.attention.triton_scene import DEVICE, DTYPES, NAN, SMALL, TOLERANCE, Scene, Shape, items

PREFIX = Tile(rows=32, keys=16, num_warps=4, num_stages=2)
# 1: no cached key at all. 17: a part with nothing but the new key. 16: a block filled by it.
CONTEXTS = [1, 47, 16, 17, 60]


@dataclass(frozen=True, slots=True)
class Found:
    """What a step left behind."""

    out: Tensor  # [E, num_heads * head_dim]
    cache: Tensor


def turning_layer(shape: Shape, rotary_dim: int, normed: str, window: int | None) -> AttentionLayer:
    """Norms and rotations that change something. `normed`: letters of the heads that have a norm."""
    generator = torch.Generator().manual_seed(rotary_dim)
    norms = [
        (torch.rand(shape.head_dim, generator=generator) + 0.5).to(DEVICE) if name in normed else None
        for name in "qk"
    ]
    angles = torch.randn(512, rotary_dim // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE)
    return replace(shape.layer(window), q_norm=norms[0], k_norm=norms[1], eps=1e-5, cos_sin=cos_sin)


def plan_step(scene: Scene, extra_items: int, prefix: PrefixPlan | None, workspace: Workspace) -> TritonStep:
    plan = plan_decode(scene.context_lens, scene.rows, prefix, extra_items, 16, 16)
    positions = torch.from_numpy(scene.context_lens - 1)
    size, rows = scene.shape.block_size, torch.from_numpy(scene.rows).long()
    slots = scene.tables[rows, positions.long() // size] * size + positions % size
    padding = len(scene.qkv) - len(slots)
    return TritonStep(
        positions=torch.cat((positions, positions.new_zeros(padding))).int().to(DEVICE),
        slots=torch.cat((slots, slots.new_full((padding,), -1))).int().to(DEVICE),
        block_tables=scene.on_device[2],
        decodes=items(plan.items, len(plan.items) + 3),
        prefixes=items(prefix.items, len(prefix.items) + 1) if prefix else None,
        members=items(prefix.members(scene.context_lens, plan), 9).table if prefix else None,
        chunks=None,
        workspace=workspace,
    )


def run(scene: Scene, layer: AttentionLayer, step: TritonStep, fused: bool) -> Found:
    """A step's launches on copies of the scene's tensors, as the backend does them, or with heads made ready first."""
    qkv, cache = scene.on_device[0].clone(), scene.on_device[1].clone()
    slots = step.slots[: len(scene.rows)].long()
    size, num_entries = scene.shape.block_size, len(scene.rows)
    cache[slots // size, :, :, slots % size] = NAN  # not there before the step
    group = layer.num_heads // layer.num_kv_heads
    if fused:
        given = qkv.clone()
        backend = TritonAttention(Tuning(group, SMALL, PREFIX, PREFIX, descriptors=False))
        out = backend.attend(qkv, layer, cache, step)
        assert torch.equal(qkv.nan_to_num(), given.nan_to_num())
        assert not step.workspace.counters.any()
        return Found(out[:num_entries], cache)
    norms, heads = (layer.q_norm, layer.k_norm), (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    rope_write(qkv, step.positions, step.slots, layer.cos_sin, *norms, layer.eps, cache, *heads)
    out, where = scene.blank(), (qkv, cache, step.block_tables)
    if step.prefixes is not None and step.members is not None:
        shared = step.prefixes.table, step.prefixes.count, step.members
        prefix_attention(*where, *shared, step.workspace, layer, PREFIX, False)
    assert step.decodes is not None
    own = step.decodes.table, step.decodes.count
    decode_attention(*where, *own, step.workspace, layer, SMALL, False, out)
    return Found(out[:num_entries], cache)


def check_fused(
    scene: Scene, layer: AttentionLayer, extra_items: int, prefix: PrefixPlan | None = None
) -> None:
    step = plan_step(scene, extra_items, prefix, scene.workspace())
    expected, got = run(scene, layer, step, fused=False), run(scene, layer, step, fused=True)
    tolerance = TOLERANCE[scene.dtype]
    torch.testing.assert_close(got.out, expected.out, rtol=0, atol=tolerance)
    torch.testing.assert_close(got.cache, expected.cache, rtol=tolerance, atol=tolerance, equal_nan=True)
    # Nothing but the new places was written.
    slots, size = step.slots[: len(scene.rows)].long(), scene.shape.block_size
    for found in (expected, got):
        found.cache[slots // size, :, :, slots % size] = 0
    assert torch.equal(got.cache.nan_to_num(nan=77.0), expected.cache.nan_to_num(nan=77.0))


@pytest.mark.parametrize(
    ("shape", "rotary_dim", "normed", "extra_items"),
    [
        (Shape(2, 2, 64, 8), 64, "qk", 0),
        (Shape(4, 2, 128, 16), 128, "", 9),
        (Shape(3, 1, 80, 8), 80, "qk", 9),
        (Shape(7, 1, 80, 16), 32, "q", 9),
        (Shape(4, 1, 96, 8), 24, "k", 0),
    ],
)
def test_heads_are_readied_on_the_way(shape: Shape, rotary_dim: int, normed: str, extra_items: int) -> None:
    scene = Scene(shape, CONTEXTS, [1] * len(CONTEXTS))
    check_fused(scene, turning_layer(shape, rotary_dim, normed, None), extra_items)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_type(dtype: torch.dtype) -> None:
    scene = Scene(Shape(4, 2, 64, 16), CONTEXTS, [1] * len(CONTEXTS), dtype)
    check_fused(scene, turning_layer(scene.shape, 64, "qk", None), 9)


@pytest.mark.parametrize(("window", "extra_items"), [(1, 9), (5, 0), (40, 9)])
def test_windows(window: int, extra_items: int) -> None:
    scene = Scene(Shape(), CONTEXTS, [1] * len(CONTEXTS))
    check_fused(scene, turning_layer(scene.shape, 64, "qk", window), extra_items)


@pytest.mark.parametrize(("window", "extra_items"), [(None, 0), (50, 6)])
@pytest.mark.parametrize(("shape", "rotary_dim"), [(Shape(4, 2, 64, 8), 64), (Shape(3, 1, 80, 8), 32)])
def test_shared_prefixes(shape: Shape, rotary_dim: int, window: int | None, extra_items: int) -> None:
    scene = Scene(shape, [49, 55, 100, 62, 3], [1] * 5, shared=4, shared_blocks=6)
    groups = find_groups(scene.tables.numpy(), scene.rows, (scene.context_lens - 1) // 8, 2, 2, 4)
    members_per_tile = PREFIX.rows // (shape.num_heads // shape.num_kv_heads)
    prefix = plan_prefix(groups, scene.rows, 8, members_per_tile, extra_items, 16, 16, 12, 100)
    assert prefix is not None
    check_fused(scene, turning_layer(shape, rotary_dim, "q", window), extra_items, prefix)
