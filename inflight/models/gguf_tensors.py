"""The tensors of a GGUF file, behind the interface that the `safetensors` package has for its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.gguf_file import GgufFile, GgufTensor
from inflight.layers.gguf_blocks import dequantize

_VECTORS = ("ffn_gate_inp_shexp.weight",)  # matrices of one row, from which converters remove a dimension


@dataclass(frozen=True, slots=True)
class _Header:
    tensor: GgufTensor

    def get_shape(self) -> list[int]:
        shape = self.tensor.shape
        return [1, *shape] if self.tensor.name.endswith(_VECTORS) and len(shape) == 1 else list(shape)

    def get_dtype(self) -> str:
        name = self.tensor.type.name
        return name if name in ("F32", "F16", "BF16") else "F32"


class GgufTensors:
    """Blocks become float32 when they are read."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def keys(self) -> Iterable[str]:
        return self._file.tensors

    def get_slice(self, name: str) -> _Header:
        return _Header(self._file.tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        header = self.get_slice(name)
        tensor = header.tensor
        data = torch.frombuffer(bytearray(self._file.data(tensor)), dtype=torch.uint8)
        row_bytes = tensor.shape[-1] // tensor.type.num_values * tensor.type.num_bytes
        return dequantize(data.view(-1, row_bytes), tensor.type.name).reshape(header.get_shape())
