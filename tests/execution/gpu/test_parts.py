"""A feature of a row is one step part: this one gives every token a number of its request, which is added to its
embedding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from inflight import LLM
from inflight.errors import EngineError
from inflight.execution.gpu.parts import PackedUpload, Section, StepPart, merged_sections, put
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.runner import GpuRunner
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.step import HostStep, Ints, StepResult
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling.batch import Admission, Sampled
from tests.execution.gpu import interpreted as platform_module
from tests.execution.gpu.interpreted import DEVICE, InterpretedPlatform
from tests.execution.gpu.test_runner import PROMPTS, answers, greedy, pytestmark  # noqa: F401
from tests.execution.gpu.test_runner import folder as folder
from tests.execution.gpu.test_runner import interpreted as interpreted

UNUSED = -7
SCALE = 0.25


def mark_of(prompt: Sequence[int]) -> int:
    return prompt[0] % 5


@dataclass
class ReadMarks:
    """Implements `StepResult`."""

    marks: list[int]
    read: list[list[int]]

    def read_into(self, result: Sampled) -> None:  # noqa: ARG002
        self.read.append(self.marks)


class Marks(StepPart):
    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        self._by_row = np.zeros(max_rows, dtype=np.int32)
        self.marks: Tensor | None = None
        self.opened: list[tuple[StepShape, list[int], list[int]]] = []  # marks and rows of each step's tokens
        self.read: list[list[int]] = []
        self.warmed: list[StepShape] = []
        embed = decoder.embed

        def marked(token_ids: Tensor) -> Tensor:
            assert self.marks is not None
            return embed(token_ids) + SCALE * self.marks[:, None].clamp(min=0)

        decoder.embed = marked  # type: ignore[method-assign]

    def admit(self, admissions: Sequence[Admission]) -> None:
        for row, request in admissions:
            self._by_row[row] = mark_of(request.token_ids)

    def sections(self, shape: StepShape) -> dict[str, Section]:
        return {"marks": Section(shape.num_tokens, UNUSED)}

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        put(sections["marks"], self._by_row[step.token_rows])

    def open(self, shape: StepShape, sections: dict[str, Tensor]) -> None:
        self.marks = sections["marks"]
        self.opened.append((shape, self.marks.tolist(), sections["token_rows"].tolist()))

    def results(self, step: HostStep, sections: dict[str, Tensor], hidden: Tensor) -> StepResult:  # noqa: ARG002
        return ReadMarks(sections["marks"][: step.num_tokens].tolist(), self.read)

    def warm_up(self, shapes: Collection[StepShape]) -> None:
        self.warmed += shapes


@pytest.fixture
def parts(interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Marks]]:
    """The parts of the runners that are made."""
    made: list[Marks] = []

    class MarkedRunner(GpuRunner):
        def step_parts(self) -> list[StepPart]:
            made.append(Marks(self.decoder, len(self.rows.tokens)))
            return [*super().step_parts(), made[-1]]

    monkeypatch.setattr(platform_module, "GpuRunner", MarkedRunner)
    yield made
    assert interpreted.runners


def test_every_token_gets_the_number_of_its_request(folder: Path, parts: list[Marks]) -> None:
    marked = answers(folder, greedy(), max_num_batched_tokens=24)  # prompts are cut, beside decodes
    (part,) = parts
    assert any(shape.num_tokens > sum(row >= 0 for row in rows) for shape, _, rows in part.opened)
    for _, marks, rows in part.opened:
        assert [mark == UNUSED for mark in marks] == [row < 0 for row in rows]
    assert sorted({mark for marks in part.read for mark in marks}) == sorted({mark_of(p) for p in PROMPTS})
    num_tokens = sum(map(len, part.read))
    assert num_tokens == sum(row >= 0 for _, _, rows in part.opened for row in rows)
    alone = [answers_to(folder, prompt) for prompt in PROMPTS]
    assert [tokens for tokens, _ in marked] == alone


def answers_to(folder: Path, prompt: list[int]) -> list[int]:
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "block_size": 8}
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, num_blocks=60, **options) as llm:
        return llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0].token_ids


def test_part_changes_the_tokens(
    folder: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answers_to(folder, [4, 6, 7, 8, 9])
    assert interpreted.runners

    class MarkedRunner(GpuRunner):
        def step_parts(self) -> list[StepPart]:
            return [*super().step_parts(), Marks(self.decoder, len(self.rows.tokens))]

    monkeypatch.setattr(platform_module, "GpuRunner", MarkedRunner)
    assert answers_to(folder, [4, 6, 7, 8, 9]) != plain


def test_steps_of_padding_have_the_padding_of_the_part(folder: Path, parts: list[Marks]) -> None:
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 8, "block_size": 8}
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
        runner = llm._engine.core.runner
        assert isinstance(runner, GpuRunner)
        shapes = runner.buckets.usual()
        runner.prepare(shapes)
    (part,) = parts
    assert [shape for shape, _, _ in part.opened] == part.warmed == shapes
    for shape, marks, rows in part.opened:
        assert marks == [UNUSED] * shape.num_tokens
        assert rows == [-1] * shape.num_tokens


def test_two_parts_cannot_declare_the_same_section() -> None:
    class Other(StepPart):
        def sections(self, shape: StepShape) -> dict[str, Section]:  # noqa: ARG002
            return {"numbers": Section(3), "positions": Section(1)}

    rows = DeviceRows(max_rows=1, max_len=4, block_size=4, device=DEVICE)
    with pytest.raises(EngineError, match=r"Other declares sections of another part: \['positions'\]"):
        merged_sections([rows, Other()], StepShape(1, 1, 0, 1, prefix=False))


def test_sections_are_aligned_and_begin_with_their_padding() -> None:
    upload = PackedUpload(
        lambda size: {"a": Section(size, 5), "b": Section(2), "c": Section(3, -1)}, [6], DEVICE
    )
    for size in (6, 1, 6):
        layout = upload.layout(size)
        pinned, sections = upload.stage(layout)
        assert {name: part.tolist() for name, part in sections.items()} == {
            "a": [5] * size,
            "b": [0, 0],
            "c": [-1, -1, -1],
        }
        put(sections["b"], np.array([8]))
        upload.send(pinned)
        on_device = layout.on_device
        assert {name: part.tolist() for name, part in on_device.items()} == {
            "a": [5] * size,
            "b": [8, 0],
            "c": [-1, -1, -1],
        }
        assert [part.data_ptr() % 16 for part in on_device.values()] == [0, 0, 0]
    assert upload.shapes_met == {1, 6}
