"""Tile sizes of the attention kernels, by device, number type and head size: all that was measured, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import next_power_of_2


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program works: `rows` queries meet `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int  # tiles of keys and values on their way at once, the one in use included
    # Values that a program holds at once where it merges parts: more take the registers of another program.
    merged: int = 4096


FEW_ENTRIES = 16  # up to here, programs are so few that each must keep more on its way


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of each kernel for one model on one device."""

    group: int  # query heads a KV head
    decode: Tile
    decode_few: Tile  # for steps of few entries; as many keys at a time as `decode`
    prefix: Tile
    chunk: Tile
    descriptors: bool  # whether the device copies whole tiles by itself (TMA), and tiles are such that it can
    early: bool = False  # whether kernels start before those they wait for are done

    def decode_for(self, num_tokens: int) -> Tile:
        """For a step of so many tokens."""
        return self.decode_few if num_tokens <= FEW_ENTRIES else self.decode

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
            decode=Tile(decode_rows, keys, 4, 2),
            decode_few=Tile(decode_rows, keys, 4, 2),
            prefix=Tile(32, keys, 4, 1),
            chunk=Tile(32, keys, 4, 1),
            descriptors=False,
        )
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if not hopper:
        # About 100 KB of shared memory a multiprocessor on the smallest of these devices.
        keys = 64 if dim <= 64 else 32
        rows = 64 if dim > 128 else 128
        decode = Tile(decode_rows, keys, 4, 3 if dim <= 128 else 2)
        return Tuning(
            group=group,
            decode=decode,
            decode_few=decode,
            prefix=Tile(rows, keys, 8 if rows == 128 else 4, 2),
            chunk=Tile(rows, keys, 8 if rows == 128 else 4, 2),
            descriptors=False,
        )
    # As measured on an H200.
    stages = 3 if dim <= 128 else 2
    return Tuning(
        group=group,
        decode=Tile(decode_rows, 64 if dim <= 128 else 32, 4, 2),
        decode_few=Tile(decode_rows, 64 if dim <= 128 else 32, 2, 3, merged=8192),
        prefix=Tile(128, 64, 8, stages),
        chunk=Tile(128, 128 if dim <= 128 else 64, 8, stages),
        descriptors=head_dim == dim,
        early=True,
    )
