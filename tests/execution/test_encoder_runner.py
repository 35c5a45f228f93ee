"""What an encoder's runner does besides steps: those against transformers are in tests/e2e/test_encoders.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from inflight.execution.encoder_runner import EncoderRunner
from inflight.models.encoder import TextBatch


class Recorder:
    """In place of an encoder: which texts it was given."""

    def __init__(self) -> None:
        self.encoder = SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(num_segments=2))
        self.steps: list[list[int]] = []

    def vectors(self, texts: TextBatch) -> Tensor:
        assert len(texts.token_ids) == sum(texts.sequences.lengths)
        self.steps.append(texts.sequences.lengths)
        return torch.zeros(len(texts.sequences.lengths), 1)


def test_the_smallest_and_the_largest_step_are_computed_ahead() -> None:
    model: Any = Recorder()
    EncoderRunner(model).warm_up(max_len=100, max_tokens=350)
    assert model.steps == [[1], [100, 100, 100]]
