"""Counts the bytes that an object holds in tensors."""

from __future__ import annotations

from typing import Any

import torch

from inflight.models.tensors import tensors_of


def held(owner: Any) -> int:
    """Return the bytes of all tensors that an object, such as a decoder, holds."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sizes[value.data_ptr()] = value.nbytes
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif type(value).__module__.startswith("inflight.") and id(value) not in seen:
            seen.add(id(value))
            look([getattr(value, name) for name in _attributes(value) if hasattr(value, name)])

    look(owner)
    return sum(sizes.values())


def storage_bytes(model: object, device: str = "cpu") -> int:
    """Return the bytes of the memory on a device, "cpu" or "cuda", that the tensors of a model keep allocated."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(model) if tensor.device.type == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _attributes(value: Any) -> list[str]:
    names = list(getattr(value, "__dict__", {}))
    return names + [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
