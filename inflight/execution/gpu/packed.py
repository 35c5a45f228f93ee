"""All that the host tells the device about one step, in one int32 array and one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]

ALIGNMENT = 4  # sections start at multiples of 16 bytes, as wide loads want them


class Layout:
    """Named sections of one array."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sections: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self.sections[name] = slice(end, end + size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = end

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        """The sections as views of `buffer`."""
        return {name: buffer[section] for name, section in self.sections.items()}

    def on_host(self, array: Ints) -> dict[str, Ints]:
        return {name: array[section] for name, section in self.sections.items()}


def staging(size: int, device: torch.device) -> tuple[Tensor, Ints]:
    """Host memory that the device can copy from while the host goes on, and the same as an array.

    Torch keeps such memory until the copies from it are done, so nothing here needs to wait.
    """
    tensor = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor, tensor.numpy()
