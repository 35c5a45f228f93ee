"""The block types of GGUF files in plain torch: blocks to numbers.

A block holds small integers, the codes, with a scale for each group of 16 or 32 of them; some types also have a minimum
for each group. A value is

    scale * code - minimum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.checkpoint.gguf_file import BLOCK_TYPES
from inflight.layers.formats.schemes import FP4_VALUES

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MXFP4_CODES = tuple(int(2 * value) for value in FP4_VALUES)


@dataclass(frozen=True, slots=True)
class BlockValues:
    """The contents of blocks."""

    codes: Tensor  # [..., num_groups, group size] int8
    scales: Tensor  # [..., num_groups] float32
    minimums: Tensor | None = None  # [..., num_groups] float32


def unpack(data: Tensor, type_name: str) -> BlockValues:
    """Return the contents of blocks [rows, bytes] uint8, for each row one group after another."""
    block = BLOCK_TYPES[type_name]
    groups = _UNPACK[type_name](data.view(len(data), -1, block.num_bytes))
    flat = (len(data), -1)
    return BlockValues(
        groups.codes.reshape(*flat, groups.codes.shape[-1]),
        groups.scales.reshape(flat),
        None if groups.minimums is None else groups.minimums.reshape(flat),
    )


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Return the values of blocks [rows, bytes] uint8: [rows, n], float32 unless the type is a floating point type."""
    if type_name in _PLAIN:
        return data.view(_PLAIN[type_name])
    groups = unpack(data, type_name)
    values = groups.codes.float().mul_(groups.scales[..., None])
    if groups.minimums is not None:
        values.sub_(groups.minimums[..., None])
    return values.flatten(1)


# Each of these gets blocks [rows, blocks, bytes].


def _halves(part: Tensor) -> Tensor:
    """Return a float16 number of each block as float32, [rows, blocks, 1]."""
    return part.contiguous().view(torch.float16).float()


def _nibbles(part: Tensor) -> Tensor:
    """Return 4-bit codes [..., 2n]: the low halves of all bytes [..., n], then the high halves."""
    return torch.cat((part & 15, part >> 4), dim=-1).to(torch.int8)


def _fifth_bits(part: Tensor) -> Tensor:
    """Return 32 bits [..., 4] as [..., 32] int8, each worth 16."""
    places = torch.arange(8, dtype=torch.uint8, device=part.device)
    return (((part[..., None] >> places) & 1) << 4).flatten(-2).to(torch.int8)


def _q8_0(blocks: Tensor) -> BlockValues:
    return BlockValues(blocks[..., 2:].view(torch.int8), _halves(blocks[..., :2]))


def _q4_0(blocks: Tensor) -> BlockValues:
    return BlockValues(_nibbles(blocks[..., 2:]) - 8, _halves(blocks[..., :2]))


def _q4_1(blocks: Tensor) -> BlockValues:
    return BlockValues(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), -_halves(blocks[..., 2:4]))


def _q5_0(blocks: Tensor) -> BlockValues:
    codes = _nibbles(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6]) - 16
    return BlockValues(codes, _halves(blocks[..., :2]))


def _q5_1(blocks: Tensor) -> BlockValues:
    codes = _nibbles(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8])
    return BlockValues(codes, _halves(blocks[..., :2]), -_halves(blocks[..., 2:4]))


def _mxfp4(blocks: Tensor) -> BlockValues:
    values = torch.tensor(_MXFP4_CODES, dtype=torch.int8, device=blocks.device)
    codes = values[_nibbles(blocks[..., 1:]).long()]
    exponents = blocks[..., :1].int() - 128
    return BlockValues(codes, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents))


def _k_scales(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and eight minimums [..., 8] that 12 bytes hold in 6 bits each."""
    first, second, third = part[..., :4], part[..., 4:8], part[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return scales, minimums


def _k_groups(blocks: Tensor, codes: Tensor) -> BlockValues:
    scales, minimums = _k_scales(blocks[..., 4:16])
    return BlockValues(codes, _halves(blocks[..., :2]) * scales, _halves(blocks[..., 2:4]) * minimums)


def _k_nibbles(part: Tensor) -> Tensor:
    """Return the low bits of eight groups [..., 8, 32]: 32 bytes hold two groups."""
    shape = part.shape[:-1]
    return _nibbles(part.reshape(*shape, 4, 32)).view(*shape, 8, 32)


def _q4_k(blocks: Tensor) -> BlockValues:
    return _k_groups(blocks, _k_nibbles(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> BlockValues:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = ((blocks[..., None, 16:48] >> places) & 1) << 4  # bit g of all bytes belongs to group g
    return _k_groups(blocks, _k_nibbles(blocks[..., 48:]) + fifth.to(torch.int8))


def _q6_k(blocks: Tensor) -> BlockValues:
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))  # [..., 2, 128]
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> places) & 3  # [..., 2, 4, 32]
    codes = low + (high << 4).to(torch.int8).flatten(-2) - 32
    scales = blocks[..., 192:208].view(torch.int8) * _halves(blocks[..., 208:])
    return BlockValues(codes.view(*shape, 16, 16), scales)


_UNPACK: Mapping[str, Callable[[Tensor], BlockValues]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}

BLOCKS = tuple(_UNPACK)  # the names of the types that are not floating point types


def quantize_q8_0(values: Tensor) -> Tensor:
    """Return rows [rows, n] as blocks [rows, bytes] uint8 of the type Q8_0."""
    groups = values.float().reshape(len(values), -1, 32)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups / scales.float().clamp(min=2.0**-24)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=-1).flatten(1)
