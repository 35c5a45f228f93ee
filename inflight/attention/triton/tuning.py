"""Tile sizes of the attention kernels, by device, number type and head size: all that was measured, in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton import next_power_of_2

ANY = 1 << 30  # tokens


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program works: `rows` queries meet `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int  # tiles of keys and values on their way at once, the one in use included
    # Values that a program holds at once where it merges parts: more take the registers of another program.
    merged: int = 4096
    programs: float = 5.0  # of a split decode, that run at once on a multiprocessor
    registers: int | None = None  # the most for a thread, where the compiler would take more


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of each kernel for one model on one device."""

    group: int  # query heads a KV head
    # Ascending: up to how many tokens of a step, and the tile. The fewer programs, the more each must keep on its way.
    decodes: tuple[tuple[int, Tile], ...]
    prefix: Tile
    chunk: Tile
    descriptors: bool  # whether the device copies whole tiles by itself (TMA), and tiles are such that it can
    early: bool = False  # whether kernels start before those they wait for are done
    # For a few decodes of short contexts: what a program has on its way is much of what it reads.
    near: Tile | None = None

    def decode_for(self, num_tokens: int, near: bool) -> Tile:
        """For a step of so many tokens."""
        if near and self.near is not None:
            return self.near
        return next(tile for most, tile in self.decodes if num_tokens <= most)

    @property
    def most_programs(self) -> float:
        """Of a decode, whatever the step."""
        return max(tile.programs for _, tile in self.decodes)  # `near` has no more

    @property
    def prefix_members(self) -> int:
        """Requests whose queries fit in one prefix tile."""
        return self.prefix.rows // self.group

    @property
    def chunk_positions(self) -> int:
        """Positions whose queries fit in one chunk tile."""
        return self.chunk.rows // self.group


def choose(dtype: torch.dtype, head_dim: int, group: int, device: torch.device) -> Tuning:
    """Tiles that fit the device's shared memory."""
    dim = next_power_of_2(head_dim)
    decode_rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        # Products in full precision run on the plain units: small tiles, for parity and not for speed.
        keys = 32 if dim <= 128 else 16
        return Tuning(
            group=group,
            decodes=((ANY, Tile(decode_rows, keys, 4, 2)),),
            prefix=Tile(32, keys, 4, 1),
            chunk=Tile(32, keys, 4, 1),
            descriptors=False,
        )
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if not hopper:
        # About 100 KB of shared memory a multiprocessor on the smallest of these devices.
        keys = 64 if dim <= 64 else 32
        rows = 64 if dim > 128 else 128
        return Tuning(
            group=group,
            decodes=((ANY, Tile(decode_rows, keys, 4, 3 if dim <= 128 else 2)),),
            prefix=Tile(rows, keys, 8 if rows == 128 else 4, 2),
            chunk=Tile(rows, keys, 8 if rows == 128 else 4, 2),
            descriptors=False,
        )
    # As measured on an H200.
    stages, keys = (3, 64) if dim <= 128 else (2, 32)
    few = Tile(decode_rows, keys, 2, 3, merged=8192, programs=3.0)
    some = Tile(decode_rows, keys, 4, 4, merged=8192, programs=2.0)
    many = Tile(decode_rows, keys, 4, 2)
    if group <= 2:
        many = replace(many, merged=8192, programs=4.0, registers=128)
    return Tuning(
        group=group,
        decodes=((8, few), (16 if group <= 2 else 32, some), (ANY, many)),
        prefix=Tile(128, 64, 8, stages),
        chunk=Tile(128, 128 if dim <= 128 else 64, 8, stages),
        descriptors=head_dim == dim,
        early=True,
        near=Tile(decode_rows, 2 * keys, 4, 3, merged=8192, programs=1.0),
    )
