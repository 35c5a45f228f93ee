"""Warm-up and packing of the encoder runner; tests/e2e/test_encoders.py compares its steps with transformers."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from inflight.execution.encoder_runner import EncoderRunner
from inflight.models.encoders.encoder import TextBatch
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission, Batch


class Recorder:
    """Records the texts that an encoder would get."""

    def __init__(self) -> None:
        self.encoder = SimpleNamespace(
            device=torch.device("cpu"), spec=SimpleNamespace(num_segments=2), kernels=None
        )
        self.steps: list[list[int]] = []

    def vectors(self, texts: TextBatch) -> Tensor:
        assert texts.sequences.lengths is not None
        assert len(texts.token_ids) == sum(texts.sequences.lengths)
        self.steps.append(texts.sequences.lengths)
        return torch.tensor(texts.sequences.lengths, dtype=torch.float32).unsqueeze(1)


def test_warm_up_computes_the_smallest_and_the_largest_step() -> None:
    model: Any = Recorder()
    EncoderRunner(model).warm_up(max_len=100, max_tokens=350)
    assert model.steps == [[1], [100, 100, 100]]


def test_padding_is_computed_and_its_vectors_are_nobodys() -> None:
    model: Any = Recorder()
    runner = EncoderRunner(model)
    runner.padded = True
    lengths = [3, 7, 5]
    requests = [
        Request.create(str(row), [1] * length, SamplingParams(), 0, task="pool")
        for row, length in enumerate(lengths)
    ]
    admissions = [Admission(row, request.current_spec()) for row, request in enumerate(requests)]
    handle = runner.launch(Batch(0, [0, 1, 2], [0, 0, 0], lengths, admissions=admissions))
    (computed,) = model.steps
    assert sum(computed) == 3 * 7
    vectors = runner.collect(handle).vectors
    assert {entry: array("f", vector).tolist() for entry, vector in vectors.items()} == {
        0: [3],
        1: [7],
        2: [5],
    }
