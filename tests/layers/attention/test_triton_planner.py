"""The planner on a large chip: how far decodes are split, and that plans fit their buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inflight.layers.attention.triton.planner import AttentionPlanner
from inflight.layers.attention.triton.tuning import ANY, AttentionTile, HeadShape, Tuning
from tests.layers.attention.triton_scene import SMALL

FEW, SOME, MANY = (replace(SMALL, programs=programs) for programs in (3.0, 2.0, 5.0))
SHORT_CONTEXT_TILE = replace(SMALL, keys=2 * SMALL.keys, programs=1.0)
PROCESSORS, HEADS = 132, 8


def planner(short_context: AttentionTile | None = None, num_heads: int = HEADS) -> AttentionPlanner:
    tuning = Tuning(
        2, ((8, FEW), (32, SOME), (ANY, MANY)), SMALL, SMALL, descriptors=False, short_context=short_context
    )
    return AttentionPlanner(
        tuning,
        HeadShape(2 * num_heads, num_heads, 64),
        16,
        max_entries=256,
        num_processors=PROCESSORS,
        share_prefixes=False,
    )


def num_items(made: AttentionPlanner, num_entries: int, context: int) -> int:
    rows = np.arange(num_entries, dtype=np.int32)
    contexts = np.full(num_entries, context, dtype=np.int32)
    work = made.decodes(contexts, rows, np.zeros((num_entries, 1), dtype=np.int32), version=0)
    return len(work.decode.items)


def test_plan_fits_every_step_shape_that_holds_its_entries() -> None:
    made = planner()
    for num_entries in (1, 7, 8, 9, 31, 32, 33, 100, 256):
        for context in (1, 300, 5000, 40_000):
            most = num_items(made, num_entries, context)
            for capacity in (num_entries, num_entries + 1, 33, 256):
                if capacity >= num_entries:
                    assert most <= made.max_decode_items(capacity)


@pytest.mark.parametrize(("num_entries", "programs"), [(8, 3.0), (32, 2.0), (64, 5.0)])
def test_long_decodes_are_split_into_the_programs_that_run_at_once(num_entries: int, programs: float) -> None:
    running = num_items(planner(), num_entries, 20_000) * HEADS / PROCESSORS
    assert 0.7 * programs <= running <= max(programs, (num_entries + 27) * HEADS / PROCESSORS)


@pytest.mark.parametrize(
    ("num_entries", "context", "alone", "short_context"),
    [
        (1, 300, True, False),
        (2, 1024, True, True),
        (8, 300, True, True),
        (9, 300, True, False),
        (8, 1025, True, False),
        (8, 300, False, False),
    ],
)
def test_few_decodes_of_short_contexts_use_their_own_tile(
    num_entries: int, context: int, alone: bool, short_context: bool
) -> None:
    contexts = np.full(num_entries, 20, dtype=np.int32)
    contexts[-1] = context
    rows, tables = np.arange(num_entries, dtype=np.int32), np.zeros((num_entries, 1), dtype=np.int32)
    assert (
        planner(SHORT_CONTEXT_TILE).decodes(contexts, rows, tables, 0, alone).short_context == short_context
    )
    assert (
        not planner().decodes(contexts, rows, tables, 0, alone).short_context
    )  # a device without such a tile


@pytest.mark.parametrize("num_heads", [1, 8, 30, 40, 200])
def test_decodes_of_short_contexts_run_all_at_once(num_heads: int) -> None:
    made = planner(SHORT_CONTEXT_TILE, num_heads)
    for num_entries in made.short_context_sizes:
        for context in (1, 300, 1024):
            assert num_items(made, num_entries, context) * num_heads <= PROCESSORS


@pytest.mark.parametrize("cached", [0, 5000])
@pytest.mark.parametrize("counts", [[1], [8192], [37] * 32, [3] * 200, [1, 4000, 65, 64, 63]], ids=len)
def test_chunks_fit_every_step_shape_that_holds_them(counts: list[int], cached: int) -> None:
    made = planner()
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    contexts = np.array(counts, dtype=np.int32) + cached
    plan = made.chunks(starts, contexts, np.arange(len(counts), dtype=np.int32))
    assert len(plan.items) <= made.max_chunk_items(int(starts[-1]), len(counts))
