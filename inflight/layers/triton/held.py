"""How layers on a GPU hold weights: a class for each way.

All hold matrices [E, N, K], one for each expert; a linear layer has one. A class packs rows that are loaded into them,
turns them back into numbers, names the Triton functions that multiply them, and knows for how many tokens which kernel
pays, and with which tile (the numbers are in `tuning.py`). To add a way, add a class here, a line to `allocate`, and
its sizes to `layers/gpu_weights.py`.

    PlainWeights     numbers in the compute dtype
    MultipliedBytes  fp8 or int8 codes, multiplied as they are with inputs that are quantized, too
    ConvertedBytes   the same, converted to the type of the inputs
    Int4Weights      4-bit codes: see `int4.py`
    Mxfp4Weights     MXFP4, of experts only: see `mxfp4.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from inflight.layers.formats.schemes import (
    GroupedMatrix,
    GroupScheme,
    Scheme,
    Weight,
    to_tensor,
    unpack_nibbles,
)
from inflight.layers.gpu_weights import empty_words, has_gpu_kernels
from inflight.layers.kernels import as_scheme
from inflight.layers.triton import elementwise, expert_parts, mxfp4, tuning
from inflight.layers.triton.byte_codes import (
    MAX_INT8_FEATURES,
    dequantize_bytes,
    multiply_byte_pairs,
    multiply_bytes,
)
from inflight.layers.triton.int4 import (
    dequantize_int4,
    multiply_int4,
    multiply_int4_pairs,
    pack_int4,
    pack_int4_scales,
)
from inflight.layers.triton.linear_parts import multiply_plain, multiply_tensor_cores
from inflight.layers.triton.tuning import GroupedTile, LinearTile, PairTile

Size: TypeAlias = tuple[int, int, int]  # E, N, K
PairTiles: TypeAlias = tuple[PairTile, PairTile]  # of gate and up, and of down
GroupedTiles: TypeAlias = tuple[int, GroupedTile, GroupedTile]  # the pairs of a block, and the same


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Matrices [E, N, K] as kernels read them. Gate and up of an expert are one matrix, in which row 2i is the gate of
    output i, and row 2i + 1 its up."""

    codes: Tensor  # [E, N, K]; of 4 bits [E, N, words]
    num_columns: int
    bias: Tensor | None = None  # [E, N]; linear layers have their own
    scheme: GroupScheme | None = None  # None: plain weights
    group: int = 0  # columns that share a scale; 0: all
    scales: Tensor | None = None  # [E, groups, N] float32; of 4-bit codes int32
    zeros: Tensor | None = None  # [E, groups, N] int8

    quantizes_inputs: ClassVar[bool] = False
    splits_tokens: ClassVar[bool] = False  # whether `small_linear` may divide the tokens among several tiles
    max_paired: ClassVar[int]  # tokens up to which experts are computed pair by pair
    pair_codes: ClassVar[int]  # how `pair_experts` names these weights
    multiply_pairs: ClassVar[Any]  # a Triton function like `multiply_plain_pairs`

    @property
    def size(self) -> Size:
        return self.codes.shape[0], self.codes.shape[1], self.num_columns

    # ---- loading ----

    def load(self, index: int, rows: slice, weight: Weight, first_column: int = 0) -> None:
        """Copy a weight into these rows of one matrix. Quantized weights take whole rows only."""
        raise NotImplementedError

    # ---- linear layers ----

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the first matrix [N, K] as numbers."""
        raise NotImplementedError

    def embed(self, ids: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:
        """Return rows [len(ids), K] of the first matrix as numbers."""
        raise NotImplementedError

    def pays_small(self, num_tokens: int, medium: bool) -> bool:
        """Return whether `small_linear` is the best kernel; `medium` says whether `medium_linear` is available."""
        raise NotImplementedError

    def pays_medium(self, num_tokens: int, gated: bool) -> bool:
        """Return the same for `medium_linear` if `small_linear` is not."""
        raise NotImplementedError

    def small_tile(self, num_tokens: int) -> LinearTile:
        """Return the tile of `small_linear` for a bucket of tokens."""
        raise NotImplementedError

    def multiply_few(self, tile: LinearTile) -> Any:
        """Return the Triton function with which `small_linear` multiplies: see `linear_parts.py`."""
        raise NotImplementedError

    def medium_tile(self, num_tokens: int) -> LinearTile:
        return tuning.choose_medium(num_tokens, *self.size[1:], self.codes.itemsize, *self._chip, self.group)

    @property
    def _chip(self) -> tuple[int, int]:
        return tuning.num_multiprocessors(self.codes.device), tuning.shared_memory(self.codes.device)

    # ---- experts; the sizes are those of their down projections ----

    def pair_tiles(self, top_k: int) -> PairTiles:
        raise NotImplementedError

    def grouped_tiles(self, num_pairs: int) -> GroupedTiles:
        raise NotImplementedError


class PlainWeights(HeldWeights):
    __slots__ = ()
    max_paired = tuning.MAX_PAIRED
    pair_codes = expert_parts.PLAIN_CODES.value
    multiply_pairs = expert_parts.multiply_plain_pairs

    def load(self, index: int, rows: slice, weight: Weight, first_column: int = 0) -> None:
        self.codes[index, rows, first_column : first_column + weight.shape[1]] = to_tensor(weight)

    def dense(self, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return self.codes[0]

    def embed(self, ids: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:  # noqa: ARG002
        return elementwise.embed(self.codes[0], ids, pdl)

    def pays_small(self, num_tokens: int, medium: bool) -> bool:
        return tuning.pays_small(num_tokens, *self.size[1:], self.codes.itemsize, medium)

    def pays_medium(self, num_tokens: int, gated: bool) -> bool:
        return tuning.pays_medium(num_tokens, *self.size[1:], self.codes.itemsize, gated)

    def small_tile(self, num_tokens: int) -> LinearTile:
        return tuning.choose_small(num_tokens, *self.size[1:], self.codes.itemsize, *self._chip)

    def multiply_few(self, tile: LinearTile) -> Any:
        return multiply_plain if tile.block_m <= 4 else multiply_tensor_cores

    def pair_tiles(self, top_k: int) -> PairTiles:
        return tuning.choose_pairs(top_k, *self.size[1:], self.codes.itemsize)

    def grouped_tiles(self, num_pairs: int) -> GroupedTiles:
        return tuning.choose_grouped(num_pairs, len(self.codes), self.codes.itemsize)


class QuantizedWeights(HeldWeights):
    """A base for quantized weights on a device."""

    __slots__ = ()

    def load(self, index: int, rows: slice, weight: Weight, first_column: int = 0) -> None:
        assert self.scheme is not None
        assert self.scales is not None
        matrix = as_scheme(self.scheme, weight, 0, first_column, (len(weight), self.num_columns))
        assert isinstance(matrix, GroupedMatrix)
        zeros = None if self.zeros is None else self.zeros[index, :, rows]
        self._pack(matrix, self.codes[index, rows], self.scales[index, :, rows], zeros)

    def _pack(self, matrix: GroupedMatrix, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Copy a matrix into rows."""
        raise NotImplementedError

    def pays_medium(self, num_tokens: int, gated: bool) -> bool:  # noqa: ARG002
        return False


class ByteWeights(QuantizedWeights):
    """Codes of 8 bits, as their scheme has them."""

    __slots__ = ()
    max_paired = tuning.MAX_PAIRED_BYTES
    pair_codes = expert_parts.BYTES.value
    multiply_pairs = multiply_byte_pairs

    def _pack(self, matrix: GroupedMatrix, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        codes.view(torch.uint8).copy_(matrix.codes.view(torch.uint8))
        scales.copy_(matrix.scales.T)
        if zeros is not None and matrix.zeros is not None:
            zeros.copy_(matrix.zeros.T)

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.scales is not None
        zeros = None if self.zeros is None else self.zeros[0].T
        return dequantize_bytes(self.codes[0], self.scales[0].T, zeros, self.group, dtype)

    def embed(self, ids: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:  # noqa: ARG002
        assert self.scheme is not None
        assert self.scales is not None
        ids = ids.long()
        codes = self.codes[0].view(torch.int8 if self.scheme.codes == "int8" else torch.float8_e4m3fn)[ids]
        zeros = None if self.zeros is None else self.zeros[0].T[ids]
        rows = GroupedMatrix(self.scheme, self.num_columns, codes, self.scales[0].T[ids], zeros)
        return rows.dequantize(dtype)

    def small_tile(self, num_tokens: int) -> LinearTile:
        return tuning.choose_small_bytes(num_tokens, *self.size[1:], self.group, *self._chip)

    def pair_tiles(self, top_k: int) -> PairTiles:  # noqa: ARG002
        return tuning.choose_byte_pairs(*self.size[1:])

    def grouped_tiles(self, num_pairs: int) -> GroupedTiles:
        return tuning.choose_grouped_quantized(
            num_pairs, len(self.codes), converted=not self.quantizes_inputs
        )


class MultipliedBytes(ByteWeights):
    __slots__ = ()
    quantizes_inputs = True

    def pays_small(self, num_tokens: int, medium: bool) -> bool:  # noqa: ARG002
        return num_tokens <= tuning.MAX_BYTES_SMALL

    def pays_medium(self, num_tokens: int, gated: bool) -> bool:  # noqa: ARG002
        return self.codes.dtype == torch.int8 or tuning.pays_medium_fp8(num_tokens, *self.size[1:])

    def small_tile(self, num_tokens: int) -> LinearTile:
        if num_tokens <= tuning.MAX_PLAIN:
            return tuning.choose_small_codes(num_tokens, *self.size[1:])
        return ByteWeights.small_tile(self, num_tokens)

    def multiply_few(self, tile: LinearTile) -> Any:
        return multiply_plain if tile.block_m <= 4 else multiply_bytes

    def pair_tiles(self, top_k: int) -> PairTiles:
        if self.codes.dtype == torch.float8_e4m3fn and self.group % 128 == 0:
            return tuning.choose_shared_pairs(top_k, *self.size[1:])
        return ByteWeights.pair_tiles(self, top_k)


class ConvertedBytes(ByteWeights):
    __slots__ = ()

    def pays_small(self, num_tokens: int, medium: bool) -> bool:  # noqa: ARG002
        return num_tokens <= tuning.MAX_CONVERTED_SMALL

    def multiply_few(self, tile: LinearTile) -> Any:  # noqa: ARG002
        return multiply_bytes


class Int4Weights(QuantizedWeights):
    __slots__ = ()
    splits_tokens = True
    max_paired = 0
    multiply_pairs = multiply_int4_pairs

    def _pack(self, matrix: GroupedMatrix, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:  # noqa: ARG002
        codes.copy_(pack_int4(unpack_nibbles(matrix.codes.to(codes.device)), self.group))
        scales.copy_(pack_int4_scales(matrix.scales, matrix.zeros, len(scales)))

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.scales is not None
        return dequantize_int4(self.codes[0], self.scales[0], self.num_columns, self.group, dtype)

    def embed(self, ids: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:  # noqa: ARG002
        assert self.scales is not None
        codes, scales = self.codes[0][ids], self.scales[0][:, ids]
        return dequantize_int4(codes, scales, self.num_columns, self.group, dtype)

    def pays_small(self, num_tokens: int, medium: bool) -> bool:  # noqa: ARG002
        return num_tokens <= tuning.MAX_TOKENS

    def small_tile(self, num_tokens: int) -> LinearTile:
        return tuning.choose_small_int4(num_tokens, *self.size[1:], self.group, *self._chip)

    def multiply_few(self, tile: LinearTile) -> Any:  # noqa: ARG002
        return multiply_int4

    def grouped_tiles(self, num_pairs: int) -> GroupedTiles:
        return tuning.choose_grouped_quantized(num_pairs, len(self.codes), converted=True, step=self.group)


class Mxfp4Weights(QuantizedWeights):
    __slots__ = ()
    max_paired = tuning.MAX_PAIRED_MXFP4
    pair_codes = expert_parts.MXFP4.value
    multiply_pairs = mxfp4.multiply_mxfp4_pairs

    def _pack(self, matrix: GroupedMatrix, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:  # noqa: ARG002
        codes.copy_(mxfp4.pack_codes(unpack_nibbles(matrix.codes.to(codes.device))))
        scales.copy_(mxfp4.pack_scales(matrix.scales).T)

    def pair_tiles(self, top_k: int) -> PairTiles:
        return tuning.choose_shared_pairs(top_k, *self.size[1:])

    def grouped_tiles(self, num_pairs: int) -> GroupedTiles:
        return tuning.choose_grouped_mxfp4(num_pairs, len(self.codes))


def as_held(weight: Tensor | HeldWeights) -> HeldWeights:
    return PlainWeights(weight[None], weight.shape[1]) if isinstance(weight, Tensor) else weight


def allocate(
    scheme: Scheme | None,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    fp8_products: bool,
    experts: bool,
    bias: Tensor | None = None,
) -> HeldWeights:
    """Return empty matrices, held as the scheme says if there are kernels for it, else as plain ones of this type."""
    count, num_rows, num_columns = size
    if scheme is None or not has_gpu_kernels(scheme, experts):
        return PlainWeights(torch.empty(size, dtype=dtype, device=device), num_columns, bias)
    assert isinstance(scheme, GroupScheme)
    way: type[HeldWeights]
    if scheme.bits[scheme.codes] == 4:
        words = empty_words(scheme, num_rows, num_columns, device, count)
        way, group = (Mxfp4Weights, mxfp4.GROUP) if scheme.codes == "fp4" else (Int4Weights, words.group)
        return way(words.codes, num_columns, bias, scheme, group, words.scales)
    # Codes are multiplied as they are if the model expects inputs to be quantized, too, and the chip can do so.
    multiplied = scheme.inputs == scheme.codes and scheme.group in (0, 128) and not scheme.zeros
    if scheme.codes == "int8":
        multiplied, dtype = multiplied and num_columns <= MAX_INT8_FEATURES, torch.int8
    else:
        multiplied = multiplied and fp8_products
        dtype = torch.float8_e4m3fn if multiplied else torch.uint8
    way = MultipliedBytes if multiplied else ConvertedBytes

    def of_groups(dtype: torch.dtype) -> Tensor:
        """Return [E, groups, N]. The groups of a row of a linear layer are adjacent in memory."""
        groups = scheme.num_groups(num_columns)
        if experts:
            return torch.zeros(count, groups, num_rows, dtype=dtype, device=device)
        return torch.zeros(count, num_rows, groups, dtype=dtype, device=device).transpose(1, 2)

    return way(
        torch.empty(size, dtype=dtype, device=device),
        num_columns,
        bias,
        scheme,
        scheme.group,
        of_groups(torch.float32),
        of_groups(torch.int8) if scheme.zeros else None,
    )
