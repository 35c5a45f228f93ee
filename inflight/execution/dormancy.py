"""Weights to host memory and back, under all who hold them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.engine.runner import Runner


@dataclass(frozen=True, slots=True)
class ModelDormancy:
    """Implements `Dormancy`. On a CPU the weights are where they are to be, and only the KV memory goes."""

    model: object
    device: torch.device
    make_runner: Callable[[], Runner[Any]]

    def check(self) -> None:
        """It can always be."""

    def rest(self) -> None:
        if self.device.type != "cpu":
            relocate(self.model, lambda tensor: tensor.to("cpu"))
        gc.collect()  # what the runner held goes now, not when it is looked for
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> Runner[Any]:
        if self.device.type != "cpu":
            relocate(self.model, lambda tensor: tensor.to(self.device))
        return self.make_runner()


@torch.inference_mode()
def relocate(model: object, move: Callable[[Tensor], Tensor]) -> None:
    """Give every tensor of a model the memory that `move` puts its values into. The tensors stay the same objects, so
    layers that share one go on sharing it."""
    for tensor in list(tensors_of(model)):
        tensor.data = move(tensor)


def tensors_of(root: object) -> Iterator[Tensor]:
    """Every tensor that the objects of a model hold, once."""
    seen: set[int] = set()
    open_: list[object] = [root]
    while open_:
        item = open_.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            open_ += item
        elif isinstance(item, dict):
            open_ += item.values()
        elif type(item).__module__.partition(".")[0] == __package__.partition(".")[0]:
            open_ += _values_of(item)


def _values_of(item: object) -> list[object]:
    names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in names)]
