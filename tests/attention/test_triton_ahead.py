"""Pages that are asked for before attention begins: the first ones of those that decodes read first."""

# mypy: disallow_untyped_decorators=False, disallow_untyped_defs=False, disallow_incomplete_defs=False
# ruff: noqa: N803

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.attention.triton.ahead import Ahead, pages_ahead
from inflight.attention.triton.items import Items
from inflight.attention.triton.plan import DECODE_FIELDS, plan_decode
from tests.attention.triton_scene import DEVICE


@triton.jit
def _which_pages(
    out,
    tables,
    stride,
    items,
    num_items,
    FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    number = tl.arange(0, COUNT)
    found = pages_ahead(number, tables, stride, items, num_items, FIELDS, BLOCK_SIZE, TILE_BLOCKS)
    tl.store(out + number, found)


@pytest.mark.parametrize(("block_size", "tile"), [(16, 64), (8, 32), (64, 32)])
@pytest.mark.parametrize("splits", [0, 12])
def test_pages_are_those_that_decodes_begin_with(block_size: int, tile: int, splits: int) -> None:
    rng = np.random.default_rng(0)
    contexts = np.array([300, 1, block_size, 777, 129, block_size + 1], dtype=np.int32)
    rows = rng.permutation(10)[: len(contexts)].astype(np.int32)
    tables = rng.permutation(10 * 128).astype(np.int32).reshape(10, 128)
    items = plan_decode(contexts, rows, None, splits, at_once=4, tile=tile, min_part=tile).items
    blocks = triton.cdiv(tile, block_size)

    expected = []
    for _, row, begin, end, *_ in items.tolist():
        first, last = begin // block_size, (end - 1) // block_size
        pages = tables[row, first : last + 1][:blocks].tolist()
        expected += pages + [-1] * (blocks - len(pages))

    # Behind the items lies what an earlier step left.
    held = np.concatenate((items, np.full((4, DECODE_FIELDS), 1 << 30, dtype=np.int32)))
    count = triton.next_power_of_2(len(expected) + 2 * blocks)
    out = torch.full((count,), 99, dtype=torch.int32, device=DEVICE)
    _which_pages[(1,)](
        out,
        torch.from_numpy(tables).to(DEVICE),
        tables.shape[1],
        torch.from_numpy(held).to(DEVICE),
        torch.tensor([len(items)], dtype=torch.int32, device=DEVICE),
        DECODE_FIELDS,
        block_size,
        blocks,
        count,
    )
    assert out.tolist() == expected + [-1] * (count - len(expected))


def ahead(num_bytes: int) -> Ahead:
    none = torch.zeros(1, dtype=torch.int32)
    return Ahead(Items(none, none, 0), none.view(1, 1), tile_blocks=4, num_bytes=num_bytes)


def cache(num_kv_heads: int, block_size: int, head_dim: int) -> Tensor:
    return torch.empty(3, 2, num_kv_heads, block_size, head_dim, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("num_programs", "pages"), [(1, 16), (8, 16), (12, 8), (16, 8), (64, 2), (96, 1), (128, 1), (129, 0)]
)
def test_programs_share_pages_and_ask_for_no_more(num_programs: int, pages: int) -> None:
    assert ahead(8 << 20).pages_a_program(cache(8, 16, 128), num_programs) == pages


def test_pages_that_no_runs_of_16_bytes_make_up_are_not_asked_for() -> None:
    assert ahead(8 << 20).pages_a_program(cache(1, 1, 80), 8) == 0
    assert ahead(8 << 20).pages_a_program(cache(1, 1, 128), 8) == 16
