"""How `small_linear` cuts a layer into programs: one place for all that is measured and none that is computed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

MAX_TOKENS = 64  # the largest bucket
_LARGE = 64 << 20  # bytes of weights from which a layer's time is all bandwidth, for as many tokens as that
_SMALL = 16 << 20  # bytes of weights up to which it is all latency


@dataclass(frozen=True, slots=True)
class Tile:
    """One program: `block_n` weight rows and all tokens, `block_k` features at a time."""

    block_m: int  # tokens, padded; 4 and fewer go without tensor cores
    block_n: int
    block_k: int
    slices: int  # products side by side within one step of k
    split: int  # programs that share the features of one tile
    num_warps: int
    stages: int  # steps of k in flight


def token_bucket(num_tokens: int) -> int:
    """Tokens are padded, so that few kernels are compiled: 16 cost a tensor core what 3 do."""
    return num_tokens if num_tokens <= 2 else max(16, 1 << (num_tokens - 1).bit_length())


def pays(num_tokens: int, num_rows: int, num_features: int, itemsize: int) -> bool:
    """Whether one fused kernel beats a norm, the vendor's product and a gate in a row."""
    large = num_rows * num_features * itemsize >= _LARGE
    return num_tokens <= (MAX_TOKENS if large else MAX_TOKENS // 2)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The interpreter stands in for the chip that the table below was made for."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def choose(num_tokens: int, num_rows: int, num_features: int, itemsize: int, num_sms: int) -> Tile:
    """The tile for weights [num_rows, num_features] and at most `num_tokens`, a bucket. As measured on an H200."""
    if itemsize == 4:
        if num_tokens <= 2:
            return Tile(num_tokens, 4, min(1024, _padded(num_features)), 1, 1, 4, 1)
        return Tile(max(num_tokens, 16), 32, 32, 1, 1, 4, 2)
    if num_tokens <= 2 and num_rows * num_features * itemsize <= _SMALL:
        # All of a row at once where it fits: 4096 weights, 64 registers of each thread, for a warp.
        block_k = 1024 if num_tokens == 1 else 4096
        block_k = min(block_k, _padded(num_features))
        return Tile(num_tokens, 2 * num_tokens, block_k, 1, 1, max(1, block_k // 1024), 1)
    if num_tokens <= 16:
        num_tiles = -(-num_rows // 64)
        if num_tiles > num_sms:
            return Tile(16, 64, 128, 1, 1, 4, 5)
        return Tile(16, 64, 256, 1, _split(num_sms, num_tiles, num_features // 256), 4, 3)
    if num_tokens <= 32:
        split = _split(2 * num_sms, -(-num_rows // 64), num_features // 128)
        return Tile(32, 64, 128, 1, split, 4, 4)
    if num_rows < 128 * num_sms:
        split = _split(2 * num_sms, -(-num_rows // 64), num_features // 128)
        return Tile(64, 64, 128, 1, split, 4, 3)
    return Tile(64, 128, 64, 1, 1, 4, 4)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _split(num_programs: int, num_tiles: int, num_steps: int) -> int:
    """Programs to share a tile of `num_steps` steps, so that there are about `num_programs`."""
    return max(1, min(8, num_programs // num_tiles, num_steps))
