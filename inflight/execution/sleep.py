"""Sleep: moving a model's weights to host memory and back, in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.engine.runner import Runner


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


def tensors_of(root: object) -> Iterator[Tensor]:
    """Yield every tensor that the objects of a model hold, once."""
    seen: set[int] = set()
    stack: list[object] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
        elif type(item).__module__.partition(".")[0] == __package__.partition(".")[0]:
            stack += _values_of(item)


def _values_of(item: object) -> list[object]:
    names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in names)]
