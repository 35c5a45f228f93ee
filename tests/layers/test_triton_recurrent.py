"""The gated delta net on a GPU, in pieces and token by token, against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.layers.recurrent import (
    PIECE,
    DeltaNetShape,
    LayerStates,
    allocate_states,
    blocks_per_snapshot,
    max_pieces,
)
from inflight.layers.triton import recurrent
from inflight.layers.triton.recurrent import (
    DeviceItems,
    RecurrentStep,
    StateCopier,
    TritonRecurrent,
    plan_pieces,
)
from inflight.layers.triton_utils.pdl import supports_pdl
from tests.layers.test_triton_small_linear import DEVICE
from tests.support.reference_recurrent import draw_layer, reference

SHAPES = [
    DeltaNetShape(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, kernel=4),
    DeltaNetShape(num_key_heads=2, num_value_heads=2, key_dim=24, value_dim=40, kernel=2),
]
HALF = (
    torch.bfloat16 if DEVICE == "cuda" else torch.float16
)  # the interpreter cannot multiply matrices in bfloat16
TOLERANCE = {torch.float32: 2e-4, HALF: 3e-2}
MAX_ROWS = 4


class Scene:
    """Sequences that are computed step by step, each in its own row."""

    def __init__(self, shape: DeltaNetShape, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.layer = draw_layer(shape, DEVICE)
        self.dtype = dtype
        self.projected = [
            torch.randn(length, shape.projected_size, device=DEVICE).to(dtype) for length in lengths
        ]
        self.rows = [(2 * index + 1) % MAX_ROWS for index in range(len(lengths))]
        part = 64
        self.num_ids = blocks_per_snapshot([shape.state_size], 1, 4 * part)
        cache = torch.zeros(5 * self.num_ids, part, device=DEVICE)
        (self.states,) = allocate_states([shape.state_size], [cache], MAX_ROWS)
        self.states.rows.fill_(float("nan"))  # an entry that starts at 0 must not read its row
        self.done = [0] * len(lengths)
        self.outputs: list[list[Tensor]] = [[] for _ in lengths]
        self.backend = TritonRecurrent(supports_pdl(torch.device(DEVICE)))

    def step(self, counts: dict[int, int], captures: Sequence[tuple[int, int, list[int]]] = ()) -> None:
        """Compute the next tokens of some sequences: single ones as decodes, others as chunks. Captures are
        (sequence, position, block ids)."""
        decodes = [which for which, count in counts.items() if count == 1 and self.done[which]]
        chunks = [which for which in counts if which not in decodes]
        order = [*decodes, *chunks]
        parts = [
            self.projected[which][self.done[which] : self.done[which] + counts[which]] for which in order
        ]
        padding = torch.full((3, self.layer.shape.projected_size), float("nan"), device=DEVICE)
        projected = torch.cat((*parts, padding.to(self.dtype)))
        token_rows = [row for which in order for row in [self.rows[which]] * counts[which]] + [-1] * 3
        step = RecurrentStep(
            token_rows=torch.tensor(token_rows, dtype=torch.int32, device=DEVICE),
            num_decodes=torch.tensor([len(decodes)], dtype=torch.int32, device=DEVICE),
            max_decodes=len(decodes) + 1 if decodes else 0,
            pieces=None,
            entries=None,
            captures=torch.tensor(
                [ids for _, _, ids in captures] or [[0] * self.num_ids], dtype=torch.int32, device=DEVICE
            ),
        )
        if chunks:
            sizes = [counts[which] for which in chunks]
            query_starts = np.cumsum([len(decodes), *sizes], dtype=np.int32)
            starts = np.array([self.done[which] for which in chunks], dtype=np.int32)
            rows = np.array([self.rows[which] for which in chunks], dtype=np.int32)
            wanted = [(chunks.index(which), position) for which, position, _ in captures]
            plan = plan_pieces(query_starts, starts, rows, wanted)
            assert len(plan.pieces) <= max_pieces(sum(sizes), len(chunks), len(captures))
            step = RecurrentStep(
                step.token_rows, step.num_decodes, step.max_decodes, on_device(plan.pieces, 2),
                on_device(plan.entries, 1), step.captures,
            )  # fmt: skip
        out = self.backend.delta_net(projected, self.layer, self.states, step)
        for which, part in zip(
            order, torch.split(out, [*(counts[which] for which in order), 3]), strict=False
        ):
            self.outputs[which].append(part)
            self.done[which] += counts[which]

    def check(self) -> None:
        tolerance = TOLERANCE[self.dtype]
        for which, projected in enumerate(self.projected):
            outputs, states = reference(projected[: self.done[which]], self.layer)
            assert_near(torch.cat(self.outputs[which]), outputs, tolerance)
            assert_near(self.states.rows[self.rows[which]], states[-1], tolerance)


def on_device(table: np.ndarray, spare: int) -> DeviceItems:
    flat = np.concatenate((table.reshape(-1), np.full(spare * table.shape[1], 1 << 20))).astype(np.int32)
    count = torch.tensor([len(table)], dtype=torch.int32, device=DEVICE)
    return DeviceItems(torch.from_numpy(flat).to(DEVICE), count, len(table) + spare)


def assert_near(result: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (result.double().cpu() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize("few_decodes", [recurrent.FEW_DECODES, 0])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_decodes_match_the_recurrence(
    shape: DeltaNetShape, dtype: torch.dtype, few_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "FEW_DECODES", few_decodes)
    torch.manual_seed(0)
    scene = Scene(shape, [PIECE + 40, 9], dtype)
    scene.step({0: PIECE + 5})
    scene.step({0: 1, 1: 1})  # one token of a new sequence is no decode
    scene.step({0: 2, 1: 1})
    scene.step({0: 1, 1: 3})
    scene.step({0: 31, 1: 1})
    scene.check()


def test_states_are_captured_inside_chunks() -> None:
    torch.manual_seed(1)
    scene = Scene(SHAPES[0], [PIECE + 60, 5], torch.float32)
    ids = [list(range(n * scene.num_ids, (n + 1) * scene.num_ids))[::-1] for n in range(4)]
    scene.step({0: 2, 1: 5})
    scene.step(
        {0: PIECE + 50}, [(0, 3, ids[0]), (0, 16, ids[1]), (0, PIECE + 16, ids[2]), (0, PIECE + 52, ids[3])]
    )
    scene.check()
    _, states = reference(scene.projected[0], scene.layer)
    for position, block_ids in zip((3, 16, PIECE + 16, PIECE + 52), ids, strict=True):
        scene.states.restore(0, block_ids)
        assert_near(scene.states.rows[0], states[position], TOLERANCE[torch.float32])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (PIECE, 1), (PIECE + 1, 2, PIECE - 1), (3 * PIECE,)])
def test_sequence_may_be_cut_anywhere(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    scene = Scene(SHAPES[0], [sum(sizes)], torch.float32)
    for size in sizes:
        scene.step({0: size})
    scene.check()


def test_repeated_tokens_stay_accurate() -> None:
    """Equal keys with weights near 1 and no decay: the system's powers explode, its inverse does not."""
    torch.manual_seed(3)
    scene = Scene(SHAPES[0], [2 * PIECE], torch.float32)
    projected = scene.projected[0]
    projected[:] = projected[:1].clone()
    projected[:, -2 * SHAPES[0].num_value_heads : -SHAPES[0].num_value_heads] = 8.0
    projected[:, -SHAPES[0].num_value_heads :] = -20.0
    scene.step({0: 2 * PIECE})
    scene.check()


class CountedKernel:
    def __init__(self, kernel: Any) -> None:
        self.num_launches = 0
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.num_launches += 1
        return self._kernel[grid]


@pytest.mark.parametrize("save", [True, False])
# Parts of a block that are smaller than what a program copies, equal to it, and larger; the last is no power of two.
@pytest.mark.parametrize("part", [128, 1000, recurrent.COPIED, recurrent.COPIED + 904])
def test_one_launch_copies_the_rows_of_all_layers(
    part: int, save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    sizes = [5000, 4097, 300]
    num_ids = blocks_per_snapshot(sizes, 2, 4 * part)

    def scene() -> list[LayerStates]:
        generator = torch.Generator().manual_seed(5)
        caches = [torch.randn(2 * num_ids, part, generator=generator).to(DEVICE) for _ in range(2)]
        states = allocate_states(sizes, caches, MAX_ROWS)
        for layer in states:
            layer.rows.copy_(torch.randn(layer.rows.shape, generator=generator))
        return states

    ids = torch.randperm(2 * num_ids).view(2, num_ids)
    copies = torch.cat((torch.tensor([[3], [0]]), ids), dim=1).int().to(DEVICE)
    actual, expected = scene(), scene()
    counted = CountedKernel(recurrent._copy_states)
    monkeypatch.setattr(recurrent, "_copy_states", counted)
    StateCopier(actual)(copies, save)
    assert counted.num_launches == 1
    for row, block_ids in zip((3, 0), ids.tolist(), strict=True):
        for layer in expected:
            (layer.save if save else layer.restore)(row, block_ids)
    for copied, layer in zip(actual, expected, strict=True):
        assert torch.equal(copied.rows, layer.rows)
        assert torch.equal(copied.blocks, layer.blocks)
