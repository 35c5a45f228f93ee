"""Sleep: moving a model's weights to host memory and back, in place."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.engine.runner import Runner
from inflight.models.tensors import tensors_of


@dataclass(frozen=True, slots=True)
class ModelSleepSupport:
    """Implements `SleepSupport`. On a CPU the weights stay, and only the KV memory is freed."""

    model: object
    device: torch.device
    make_runner: Callable[[], Runner[Any]]

    def check(self) -> None:
        """Do nothing: a model can always sleep."""

    def sleep(self) -> None:
        if self.device.type != "cpu":
            relocate(self.model, lambda tensor: tensor.to("cpu"))
        gc.collect()  # free what the runner held now, not at the next collection
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> Runner[Any]:
        if self.device.type != "cpu":
            relocate(self.model, lambda tensor: tensor.to(self.device))
        return self.make_runner()


@torch.inference_mode()
def relocate(model: object, move: Callable[[Tensor], Tensor]) -> None:
    """Replace the memory of every tensor of a model by what `move` returns. The tensor objects stay the same, so layers
    that share one keep sharing it."""
    for tensor in list(tensors_of(model)):
        tensor.data = move(tensor)
