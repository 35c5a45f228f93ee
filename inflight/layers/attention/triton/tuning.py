"""The measured tile sizes of the attention kernels by device, dtype and head size, in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton import next_power_of_2

ANY = 1 << 30  # tokens


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The tile of one program: `rows` queries and `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int  # tiles of keys and values in flight, including the one in use
    # Values that a program holds at once while it merges splits: more would take registers from other programs.
    merged: int = 4096
    programs: float = 5.0  # programs of a split decode that run at once on a multiprocessor
    registers: int | None = None  # limit per thread, if the compiler would use more
    codes: bool = False  # whether decodes read quantized keys and values as code_pages.py does


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of each kernel for heads of one shape on one device."""

    group: int  # query heads per KV head
    # (most tokens of a step, tile), ascending. The fewer programs, the more data each must have in flight.
    decodes: tuple[tuple[int, AttentionTile], ...]
    prefix: AttentionTile
    chunk: AttentionTile
    descriptors: bool  # whether the copy engine (TMA) can fetch these tiles
    pdl: bool = False  # whether kernels are launched with programmatic dependent launch
    # For a few decodes of short contexts, where the data in flight is much of what a program reads.
    short_context: AttentionTile | None = None
    # As `decodes`, of layers whose keys and values are quantized; empty: the same tiles as for others.
    quantized_decodes: tuple[tuple[int, AttentionTile], ...] = ()

    def decode_for(self, num_tokens: int, short_context: bool, is_quantized: bool = False) -> AttentionTile:
        """Return the tile for a step of `num_tokens` tokens."""
        has_own = is_quantized and len(self.quantized_decodes) > 0
        if short_context and self.short_context is not None and not has_own:
            return self.short_context
        return next(tile for most, tile in self._decodes(is_quantized) if num_tokens <= most)

    def most_programs(self, is_quantized: bool = False) -> float:
        """Return the largest number of programs of any decode tile."""
        return max(tile.programs for _, tile in self._decodes(is_quantized))  # `short_context` has no more

    def _decodes(self, is_quantized: bool) -> tuple[tuple[int, AttentionTile], ...]:
        return (is_quantized and self.quantized_decodes) or self.decodes

    @property
    def prefix_members(self) -> int:
        """Requests whose queries fit in one prefix tile."""
        return self.prefix.rows // self.group

    @property
    def chunk_positions(self) -> int:
        """Positions whose queries fit in one chunk tile."""
        return self.chunk.rows // self.group


@dataclass(frozen=True, slots=True)
class SequenceTuning:
    """The tile of an encoder's attention on one device."""

    tile: AttentionTile
    # Whether every tile of keys is masked: a single loop, at the cost of some work in each tile.
    mask_all: bool = False
    descriptors: bool = False  # as in `Tuning`
    pdl: bool = False


def choose_sequences(dtype: torch.dtype, head_dim: int, device: torch.device) -> SequenceTuning:
    """Tiles that fit the device's shared memory."""
    dim = next_power_of_2(head_dim)
    if dtype == torch.float32:
        return SequenceTuning(
            AttentionTile(rows=32, keys=32 if dim <= 128 else 16, num_warps=4, num_stages=1)
        )
    if not _is_hopper(device):
        return SequenceTuning(AttentionTile(rows=64, keys=64 if dim <= 64 else 32, num_warps=4, num_stages=2))
    return SequenceTuning(
        AttentionTile(rows=64, keys=32, num_warps=4, num_stages=3), descriptors=head_dim == dim, pdl=True
    )


def choose(dtype: torch.dtype, head_dim: int, group: int, device: torch.device) -> Tuning:
    """Tiles that fit the device's shared memory."""
    dim = next_power_of_2(head_dim)
    decode_rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        # Full-precision products do not use tensor cores: small tiles, for parity rather than speed.
        keys = 32 if dim <= 128 else 16
        rows = max(16, next_power_of_2(group)) if dim > 256 else 32
        stages = 1 if dim > 256 else 2
        return Tuning(
            group=group,
            decodes=((ANY, AttentionTile(rows=decode_rows, keys=keys, num_warps=4, num_stages=stages)),),
            prefix=AttentionTile(rows=rows, keys=keys, num_warps=4, num_stages=1),
            chunk=AttentionTile(rows=rows, keys=keys, num_warps=4, num_stages=1),
            descriptors=False,
        )
    if dim > 256:
        return _wide(group, decode_rows, _is_hopper(device))
    if not _is_hopper(device):
        # About 100 KB of shared memory per multiprocessor on the smallest of these devices.
        keys = 64 if dim <= 64 else 32
        rows = 64 if dim > 128 else 128
        decode = AttentionTile(rows=decode_rows, keys=keys, num_warps=4, num_stages=3 if dim <= 128 else 2)
        return Tuning(
            group=group,
            decodes=((ANY, decode),),
            prefix=AttentionTile(rows=rows, keys=keys, num_warps=8 if rows == 128 else 4, num_stages=2),
            chunk=AttentionTile(rows=rows, keys=keys, num_warps=8 if rows == 128 else 4, num_stages=2),
            descriptors=False,
        )
    # Measured on an H200.
    stages, keys = (3, 64) if dim <= 128 else (2, 32)
    few = AttentionTile(rows=decode_rows, keys=keys, num_warps=2, num_stages=3, merged=8192, programs=3.0)
    some = AttentionTile(rows=decode_rows, keys=keys, num_warps=4, num_stages=4, merged=8192, programs=2.0)
    many = AttentionTile(rows=decode_rows, keys=keys, num_warps=4, num_stages=2)
    if group <= 2:
        many = replace(many, merged=8192, programs=4.0, registers=128)
    return Tuning(
        group=group,
        decodes=((8, few), (16 if group <= 2 else 32, some), (ANY, many)),
        prefix=AttentionTile(rows=128, keys=64, num_warps=8, num_stages=stages),
        chunk=AttentionTile(rows=128, keys=128 if dim <= 128 else 64, num_warps=8, num_stages=stages),
        descriptors=head_dim == dim,
        pdl=True,
        short_context=AttentionTile(
            rows=decode_rows, keys=2 * keys, num_warps=4, num_stages=3, merged=8192, programs=1.0
        ),
        quantized_decodes=_code_tiles(dim, group),
    )


def _code_tiles(dim: int, group: int) -> tuple[tuple[int, AttentionTile], ...]:
    """Tiles that read codes as `code_pages.py` does (measured on an H200 with heads of 64 and 128 features and up to 8
    rows; others only compile).

    With many requests, one warp without barriers does the least work for a key, as long as the accumulators of its rows
    fit its registers. Splits may begin at any multiple of a later tile's keys, so those of an earlier tile must be a
    multiple of them.
    """
    rows = max(8, next_power_of_2(group))
    tile = AttentionTile(rows=rows, keys=64, num_warps=2, num_stages=2, merged=2048, programs=5.0, codes=True)
    if rows * dim > 8 * 128:
        return ((32, replace(tile, num_warps=4, num_stages=3, merged=4096, programs=3.0)), (ANY, tile))
    tile = replace(tile, registers=128)
    many = replace(tile, keys=32, num_warps=1, merged=1024, programs=16.0)
    if dim <= 64:
        return ((32, replace(tile, num_stages=3, programs=6.0)), (ANY, many))
    few = replace(tile, keys=128, num_warps=4, merged=4096, programs=4.0, registers=None)
    some = replace(few, num_stages=3, programs=3.0)
    return ((4, few), (32, some), (160, replace(tile, programs=8.0)), (ANY, many))


def _wide(group: int, decode_rows: int, is_hopper: bool) -> Tuning:
    """Tiles for heads of 512 features in 16 bits. They are the largest that fit shared memory and registers, as far as
    compiling for the device tells; they have not been measured."""
    if not is_hopper:
        rows = max(16, next_power_of_2(group))
        tile = AttentionTile(rows=rows, keys=16, num_warps=4, num_stages=2, programs=1.0)
        return Tuning(group=group, decodes=((ANY, tile),), prefix=tile, chunk=tile, descriptors=False)
    few = AttentionTile(rows=decode_rows, keys=16, num_warps=4, num_stages=4, merged=8192, programs=2.0)
    many = AttentionTile(rows=decode_rows, keys=16, num_warps=4, num_stages=2, programs=4.0)
    # Eight warps hold the accumulators of 64 rows; four would spill six times as much.
    queries = AttentionTile(rows=64, keys=32, num_warps=8, num_stages=2)
    return Tuning(
        group=group,
        decodes=((32, few), (ANY, many)),
        prefix=queries,
        chunk=queries,
        descriptors=True,
        pdl=True,
        short_context=AttentionTile(
            rows=decode_rows, keys=32, num_warps=4, num_stages=3, merged=8192, programs=1.0
        ),
    )


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
