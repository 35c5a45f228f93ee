"""The tensors of a GGUF file, behind the interface that the `safetensors` package has for its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from inflight.checkpoint.gguf_file import GgufFile, GgufTensor
from inflight.layers.formats.gguf import BlockMatrix, BlockRun, BlockStack, row_bytes
from inflight.layers.formats.gguf_blocks import BLOCKS, dequantize
from inflight.layers.formats.schemes import Weight

_VECTORS = ("ffn_gate_inp_shexp.weight",)  # matrices of one row, from which converters remove a dimension


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    tensor: GgufTensor

    def get_shape(self) -> list[int]:
        shape = self.tensor.shape
        return [1, *shape] if self.tensor.name.endswith(_VECTORS) and len(shape) == 1 else list(shape)

    def get_dtype(self) -> str:
        """Return the type as safetensors names it. Blocks stand for float32."""
        name = self.tensor.type.name
        return name if name in ("F32", "F16", "BF16") else "F32"


class GgufTensors:
    """The tensors of an opened file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def keys(self) -> Iterable[str]:
        return self._file.tensors

    def get_slice(self, name: str) -> _TensorHeader:
        return _TensorHeader(self._file.tensors[name])

    def get_tensor(self, name: str) -> Weight | BlockStack:
        """Return a tensor. Matrices in blocks stay as they are, vectors become float32."""
        header = self.get_slice(name)
        tensor, shape = header.tensor, header.get_shape()
        with warnings.catch_warnings():  # torch knows no memory that must not be written
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            data = torch.frombuffer(self._file.data(tensor), dtype=torch.uint8)
        data = data.view(-1, row_bytes(tensor.type.name, shape[-1]))
        if tensor.type.name not in BLOCKS or len(shape) not in (2, 3):
            return dequantize(data, tensor.type.name).reshape(shape)
        if len(shape) == 2:
            return BlockMatrix([BlockRun(tensor.type.name, data)], shape[1])
        return BlockStack(tensor.type.name, data, (shape[0], shape[1], shape[2]))
