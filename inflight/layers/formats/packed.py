"""Formats that pack several integer codes into each int32: compressed-tensors, AWQ and GPTQ.

All store the codes and zero points of groups of input features. They differ in the direction and order in which codes
are packed, and in the offsets of codes and zero points. Below, N is the number of rows of the matrix (outputs), K that
of its columns (inputs), G that of groups, and P that of codes in an int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import WeightsError
from inflight.layers.formats.schemes import GroupedMatrix, GroupScheme, Scheme, Weight, pack_nibbles
from inflight.layers.formats.weight_format import FormatTensor, WeightFormat, check_scales

INT32, INDEX = ("I32",), ("I32", "I64")
# AWQ's order of columns in a word, inverted: column i of eight is in nibble AWQ_NIBBLES[i].
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class _IntegerFormat(WeightFormat):
    """Integer codes of 4 or 8 bits in groups of columns."""

    bits: int
    group: int  # columns of a group; 0: all
    zeros: bool  # whether the checkpoint has zero points
    # Whether the columns of a group are adjacent; if not, the checkpoint has their groups.
    ordered: bool = True

    @property
    def scheme(self) -> Scheme | None:  # type: ignore[override]
        if not self.ordered:
            return None  # each packed part of a layer would need the inputs in its own order
        return GroupScheme("int4" if self.bits == 4 else "int8", self.group, self.zeros)

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def groups(self, num_columns: int) -> int:
        return -(-num_columns // self.group) if self.group else 1

    def _words(self, count: int, what: str) -> int:
        if count % self.per_word:
            raise WeightsError(
                f"{count} {what} cannot be packed into int32: they must be a multiple of {self.per_word}"
            )
        return count // self.per_word

    def _build(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None, name: str
    ) -> Weight:
        """Return the matrix of codes [N, K], scales [N, G] and zeros [N, G], all unsigned. `group_of` [K] is the group
        of each column, and `name` that of the scales."""
        scales = scales.float()
        check_scales(scales, name)
        num_columns = codes.shape[1]
        middle = 1 << self.bits - 1
        if group_of is not None:
            index = group_of.long()
            if not bool(((index >= 0) & (index < scales.shape[1])).all()):
                raise WeightsError(f"a column's group is out of range: there are {scales.shape[1]} groups")
            if not self.ordered:
                offsets = middle if zeros is None else zeros[:, index].float()
                return (codes.float() - offsets) * scales[:, index]
            in_order = torch.arange(num_columns, device=index.device) // (self.group or num_columns)
            if not torch.equal(index, in_order):
                raise WeightsError(
                    "columns are not in the order of their groups, but the config declares them to be"
                )
        scheme = GroupScheme("int4" if self.bits == 4 else "int8", self.group, zeros is not None)
        if self.bits == 8:
            if zeros is not None:
                if bool((zeros > 255).any()):
                    raise WeightsError("a zero point is 256: it must be a code of 8 bits")
                zeros = (zeros.to(torch.int16) - middle).to(torch.int8)
            return GroupedMatrix(
                scheme, num_columns, (codes.to(torch.int16) - middle).to(torch.int8), scales, zeros
            )
        own_zeros = None if zeros is None else zeros.to(torch.uint8)
        return GroupedMatrix(scheme, num_columns, pack_nibbles(codes.to(torch.uint8)), scales, own_zeros)


@dataclass(frozen=True)
class PackQuantizedFormat(_IntegerFormat):
    """compressed-tensors' `pack-quantized`: codes packed along the columns, zero points along the rows."""

    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        groups = self.groups(num_columns)
        tensors = [
            FormatTensor("weight_packed", (num_rows, -(-num_columns // self.per_word)), INT32),
            FormatTensor("weight_scale", (num_rows, groups)),
        ]
        if self.zeros:
            shape = -(-num_rows // self.per_word), groups
            tensors.append(FormatTensor("weight_zero_point", shape, INT32, rows_each=self.per_word))
        if not self.ordered:
            tensors.append(FormatTensor("weight_g_idx", (num_columns,), INDEX, row_axis=None))
        return tuple(tensors)

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:
        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        codes = unpack_words(packed, self.bits)[:, :num_columns]
        zeros = None
        if self.zeros:
            zeros = unpack_words(tensors["weight_zero_point"].T, self.bits).T[: len(codes)]
        return self._build(codes, scales, zeros, tensors.get("weight_g_idx"), "weight_scale")


@dataclass(frozen=True)
class AwqFormat(_IntegerFormat):
    """AutoAWQ's "gemm" layout: the transposed matrix, codes and zero points packed along the rows of the matrix."""

    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        words, groups = self._words(num_rows, "outputs"), self.groups(num_columns)
        return (
            FormatTensor("qweight", (num_columns, words), INT32, row_axis=1, rows_each=self.per_word),
            FormatTensor("qzeros", (groups, words), INT32, row_axis=1, rows_each=self.per_word),
            FormatTensor("scales", (groups, num_rows), row_axis=1),
        )

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:  # noqa: ARG002
        codes = self._unpacked(tensors["qweight"])
        return self._build(codes, tensors["scales"].T, self._unpacked(tensors["qzeros"]), None, "scales")

    def _unpacked(self, words: Tensor) -> Tensor:
        """[n, N / 8] -> [N, n]"""
        nibbles = unpack_words(words, 4).view(len(words), -1, 8)
        return nibbles[:, :, list(AWQ_NIBBLES)].flatten(1).T


@dataclass(frozen=True)
class GptqFormat(_IntegerFormat):
    """The transposed matrix, codes packed along its columns, zero points along its rows. The first version of the
    format stores zero points less one."""

    zero_offset: int = 1

    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        groups, words = self.groups(num_columns), self._words(num_rows, "outputs")
        return (
            FormatTensor("qweight", (self._words(num_columns, "inputs"), num_rows), INT32, row_axis=1),
            FormatTensor("qzeros", (groups, words), INT32, row_axis=1, rows_each=self.per_word),
            FormatTensor("scales", (groups, num_rows), row_axis=1),
            FormatTensor("g_idx", (num_columns,), INDEX, row_axis=None),
        )

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:  # noqa: ARG002
        codes = unpack_words(tensors["qweight"].T, self.bits)
        zeros = unpack_words(tensors["qzeros"], self.bits).T + self.zero_offset
        middle = 1 << self.bits - 1
        if not self.zeros and bool((zeros != middle).any()):
            raise WeightsError(f"qzeros are not all {middle}, but the config declares the weights symmetric")
        own_zeros = zeros if self.zeros else None
        return self._build(codes, tensors["scales"].T, own_zeros, tensors["g_idx"], "scales")


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """[n, m] int32 -> [n, m * bits / 32] int32, lowest bits first; missing codes are 0."""
    per_word = 32 // bits
    words = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).view(len(codes), -1, per_word)
    packed = torch.zeros_like(words[..., 0])
    for place in range(per_word):
        packed |= words[..., place] << (bits * place)
    return packed


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """[n, m] int32 -> [n, m * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
