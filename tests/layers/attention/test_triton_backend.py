from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from inflight.kv.layout import LayerKV
from inflight.layers.attention.backend import KVShape
from inflight.layers.attention.triton.backend import TableInputs, TritonAttention, TritonInputs
from inflight.layers.attention.triton.plan import find_groups, plan_chunks, plan_decode, plan_prefix
from inflight.layers.attention.triton.tuning import ANY, AttentionTile, Tuning, choose
from tests.layers.attention.triton_scene import DEVICE, SMALL, TOLERANCE, Scene, Shape, items

TILE = AttentionTile(rows=32, keys=16, num_warps=4, num_stages=2)
DEVICES = torch.device(DEVICE)


def slot_mapping_of(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slot_mapping of the scene's tokens, padding last."""
    positions, slot_mapping = [], []
    for context_len, count, row in zip(scene.context_lens, scene.counts, scene.rows, strict=True):
        at = np.arange(context_len - count, context_len)
        positions.append(at)
        size = scene.shape.block_size
        slot_mapping.append(scene.tables.numpy()[row, at // size] * size + at % size)
    padding = len(scene.qkv) - int(scene.query_starts[-1])
    positions.append(np.zeros(padding))
    slot_mapping.append(np.full(padding, -1))
    made = [
        torch.from_numpy(np.concatenate(x).astype(np.int32)).to(DEVICE) for x in (positions, slot_mapping)
    ]
    return made[0], made[1]


@pytest.mark.parametrize(("shares", "window"), [(False, None), (True, 20)])
def test_decodes_and_chunks_in_one_step_match_float64(shares: bool, window: int | None) -> None:
    shape = Shape(4, 2, 64, 8)
    # Three decodes, two of which share a prefix; a chunk on cached tokens, and a whole prompt.
    scene = Scene(shape, [60, 50, 9, 70, 33], [1, 1, 1, 25, 33], shared=2, shared_blocks=5)
    contexts, rows, num_decodes = scene.context_lens, scene.rows, 3
    tuning = Tuning(2, ((ANY, SMALL),), TILE, TILE, descriptors=False)
    prefix = None
    if shares:
        groups = find_groups(
            scene.tables.numpy(), rows[:num_decodes], (contexts[:num_decodes] - 1) // 8, 2, 2, 2
        )
        prefix = plan_prefix(groups, rows[:num_decodes], 8, tuning.prefix_members, 4, 16, 16, 8, 50)
        assert prefix is not None
    decodes = plan_decode(contexts[:num_decodes], rows[:num_decodes], prefix, 4, 64, 16, 16)
    chunks = plan_chunks(
        scene.query_starts[num_decodes:],
        contexts[num_decodes:],
        rows[num_decodes:],
        tuning.chunk_positions,
        4,
        16,
        16,
    )
    qkv, cache, tables = scene.on_device
    # This step's keys and values are not in the cache yet.
    positions, slot_mapping = slot_mapping_of(scene)
    real = slot_mapping[slot_mapping >= 0].long().cpu()
    assert isinstance(cache, torch.Tensor)
    content = cache.cpu()
    content[real // 8, :, :, real % 8] = float("nan")
    cache = content.to(DEVICE)
    workspace = scene.workspace()
    table = TableInputs(
        tuning=tuning,
        slot_mapping=slot_mapping,
        block_tables=tables,
        decodes=items(decodes.items, 12),
        prefixes=items(prefix.items, 8) if prefix else None,
        members=items(prefix.members(contexts, decodes), 4).table if prefix else None,
        chunks=items(chunks.items, 16),
    )
    step = TritonInputs(positions, slot_mapping, (table,), short_context=False, workspace=workspace)
    out = TritonAttention(torch.float32, DEVICES).attend(qkv, shape.layer(window), cache, step)
    expected = scene.expected(window)
    got = out[: len(expected)].view(expected.shape).double().cpu()
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[torch.float32])
    assert torch.equal(cache.cpu()[real // 8, :, :, real % 8], scene.cache[real // 8, :, :, real % 8])
    assert not workspace.counters.any()


def test_cache_has_the_bytes_of_its_shape() -> None:
    shape = KVShape.from_layers(
        [LayerKV(num_heads=2, key_dim=64, value_dim=64)] * 3, block_size=8, dtype=torch.float16
    )
    caches = TritonAttention(torch.float16, DEVICES).allocate(shape, 5, DEVICES).layers
    assert [list(cache.shape) for cache in caches] == [[5, 2, 2, 8, 64]] * 3
    assert sum(cache.nbytes for cache in caches) == 5 * shape.bytes_per_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_every_tile_holds_whole_query_groups(dtype: torch.dtype, head_dim: int, group: int) -> None:
    tuning = choose(dtype, head_dim, group, DEVICES)
    assert all(tile.rows >= group for _, tile in tuning.decodes + tuning.quantized_decodes)
    assert tuning.prefix_members >= 1
    assert tuning.chunk_positions >= 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_quantized_decodes_begin_with_blocks_under_every_plan(
    head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step may use the tile for more tokens than it was planned for: its splits must be whole tiles of that, too.
    monkeypatch.setattr("inflight.layers.attention.triton.tuning._is_hopper", lambda _: True)
    tiles = [tile for _, tile in choose(torch.bfloat16, head_dim, group, DEVICES).quantized_decodes]
    assert tiles
    assert all(tile.codes and tile.rows >= group for tile in tiles)
    assert all(few.keys % many.keys == 0 for few, many in pairwise(tiles))


def test_quantized_and_plain_layers_share_slots_without_overlap() -> None:
    layers = [LayerKV(2, 64, 64, quantized="fp8"), LayerKV(2, 64, 64), LayerKV(2, 64, 64, quantized="fp8")]
    shape = KVShape.from_layers(layers, block_size=8, dtype=torch.bfloat16)
    cache = TritonAttention(torch.bfloat16, torch.device("cpu")).allocate(shape, 5, torch.device("cpu"))
    assert sum(slot.nbytes for slot in cache.slots) == 5 * shape.bytes_per_block
    first, plain, second = cache.layers
    first.codes.fill_(1)
    first.scales.fill_(2)
    second.codes.fill_(3)
    second.scales.fill_(4)
    assert (first.codes == 1).all()
    assert (first.scales == 2).all()
    assert (second.codes == 3).all()
    assert plain.shape == first.codes.shape == (5, 2, 2, 8, 64)
    assert first.scales.shape == (5, 2, 8)
