"""Gated delta nets on a CPU: against float64, and bit-identical however the tokens are divided among steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.cpu_recurrent import CpuRecurrent, TorchRecurrent
from inflight.layers.native.library import Library, native_library
from inflight.layers.recurrent import (
    DeltaNetLayer,
    DeltaNetShape,
    LayerStates,
    RecurrentBackend,
    StateInputs,
    allocate_states,
    blocks_per_snapshot,
)
from tests.support.reference_recurrent import draw_layer, reference

SHAPES = [
    DeltaNetShape(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, kernel=4),
    DeltaNetShape(num_key_heads=2, num_value_heads=2, key_dim=6, value_dim=40, kernel=2),
    DeltaNetShape(num_key_heads=2, num_value_heads=6, key_dim=9, value_dim=64, kernel=3),
]
PART = 48  # values of a block
MAX_ROWS = 4
Capture = tuple[int, int, list[int]]


@pytest.fixture(scope="module")
def library() -> Library:
    library = native_library()
    if library is None:
        pytest.skip("no compiler")
    return library


@pytest.fixture(params=["torch", "compiled"])
def backend(request: pytest.FixtureRequest, library: Library) -> RecurrentBackend[StateInputs]:
    return TorchRecurrent() if request.param == "torch" else CpuRecurrent(library)


class Scene:
    """Sequences that are computed step by step, each in its own row."""

    def __init__(
        self,
        backend: RecurrentBackend[StateInputs],
        layer: DeltaNetLayer,
        sequences: Sequence[Tensor],
        rows: Sequence[int],
    ) -> None:
        size = layer.shape.state_size
        self.num_ids = blocks_per_snapshot([size], 1, 4 * PART)
        (self.states,) = allocate_states([size], [torch.zeros(6 * self.num_ids, PART)], MAX_ROWS)
        self.states.rows.fill_(float("nan"))  # an entry that starts at 0 must not read its row
        self.backend, self.layer, self.sequences, self.rows = backend, layer, sequences, rows
        self.done = [0] * len(sequences)
        self.outputs: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, counts: dict[int, int], captures: Sequence[Capture] = ()) -> None:
        """Compute the next tokens of some sequences. Captures are (sequence, position, block ids)."""
        order = list(counts)
        parts = [self.sequences[i][self.done[i] : self.done[i] + counts[i]] for i in order]
        inputs = StateInputs(
            query_starts=torch.tensor([0, *counts.values()]).cumsum(0).int(),
            rows=torch.tensor([self.rows[i] for i in order]),
            starts=torch.tensor([self.done[i] for i in order]),
            captures=[(order.index(i), position, ids) for i, position, ids in captures],
        )
        out = self.backend.delta_net(torch.cat(parts), self.layer, self.states, inputs)
        for i, part in zip(order, torch.split(out, list(counts.values())), strict=True):
            self.outputs[i].append(part)
            self.done[i] += counts[i]

    def output(self, sequence: int) -> Tensor:
        return torch.cat(self.outputs[sequence])

    def ids(self, number: int) -> list[int]:
        """Blocks of a snapshot, out of order."""
        return [5 * self.num_ids - 1 - (number * self.num_ids + i) for i in range(self.num_ids)]


def draw(shape: DeltaNetShape, lengths: Sequence[int]) -> tuple[DeltaNetLayer, list[Tensor]]:
    torch.manual_seed(0)
    return draw_layer(shape), [torch.randn(length, shape.projected_size) for length in lengths]


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_states_agree_with_float64(
    backend: RecurrentBackend[StateInputs], shape: DeltaNetShape
) -> None:
    layer, sequences = draw(shape, [19, 7, 1])
    scene = Scene(backend, layer, sequences, rows=[2, 0, 3])
    scene.step({0: 5, 2: 1})
    scene.step({1: 3, 0: 1})
    scene.step({0: 13, 1: 4})
    for index, sequence in enumerate(sequences):
        outputs, states = reference(sequence, layer)
        torch.testing.assert_close(scene.output(index).double(), outputs, rtol=1e-4, atol=1e-4)
        state = scene.states.rows[scene.rows[index]].double()
        torch.testing.assert_close(state, states[-1], rtol=1e-4, atol=1e-4)
    assert scene.states.rows[1].isnan().all()


def test_captured_states_are_those_of_a_shorter_prompt(backend: RecurrentBackend[StateInputs]) -> None:
    layer, sequences = draw(SHAPES[0], [23, 9])
    scene = Scene(backend, layer, sequences, rows=[1, 3])
    scene.step({0: 6})
    scene.step({1: 9, 0: 17}, [(0, 8, scene.ids(0)), (1, 4, scene.ids(1)), (0, 16, scene.ids(2))])
    for sequence, position, number in ((0, 8, 0), (1, 4, 1), (0, 16, 2)):
        restored = Scene(backend, layer, sequences, scene.rows)
        states = LayerStates(restored.states.rows, scene.states.blocks, scene.states.offset)
        restored.states = states
        states.restore(scene.rows[sequence], scene.ids(number))
        restored.done[sequence] = position
        rest = len(sequences[sequence]) - position
        restored.step({sequence: rest})
        actual, expected = restored.output(sequence), scene.output(sequence)[position:]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert isinstance(backend, TorchRecurrent) or torch.equal(actual, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_results_do_not_depend_on_steps_and_neighbours(
    library: Library, shape: DeltaNetShape, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, sequences = draw(shape, [70, 31])
    alone = Scene(CpuRecurrent(library), layer, sequences, rows=[0, 1])
    alone.step({0: 70})
    monkeypatch.setattr(library, "threads", threads)
    crowd = Scene(CpuRecurrent(library), layer, sequences, rows=[3, 2])
    crowd.step({1: 2, 0: 1})
    crowd.step({0: 37, 1: 1}, [(0, 20, crowd.ids(0))])
    for _ in range(3):
        crowd.step({1: 1, 0: 1})
    crowd.step({0: 29})
    assert torch.equal(crowd.output(0), alone.output(0))
    assert torch.equal(crowd.states.rows[3], alone.states.rows[0])


def test_large_layers_are_computed_by_several_threads_alike(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough work for a team of threads; the tests above may be too small for one."""
    shape = DeltaNetShape(num_key_heads=2, num_value_heads=4, key_dim=64, value_dim=64, kernel=4)
    layer, sequences = draw(shape, [40, 33])
    outputs = []
    for threads in (1, 4):
        monkeypatch.setattr(library, "threads", threads)
        scene = Scene(CpuRecurrent(library), layer, sequences, rows=[0, 1])
        scene.step({0: 40, 1: 33})
        outputs.append(torch.cat((scene.output(0), scene.output(1))))
    assert torch.equal(outputs[0], outputs[1])


def test_tensors_that_do_not_match_are_rejected(library: Library) -> None:
    layer, sequences = draw(SHAPES[0], [3])
    scene = Scene(CpuRecurrent(library), layer, [sequences[0][:, :-1]], rows=[0])
    with pytest.raises(ConfigError, match="do not match"):
        scene.step({0: 3})
