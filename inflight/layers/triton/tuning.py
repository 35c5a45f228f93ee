"""The measured choice of kernels and tiles for linear layers and norms, in one place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.runtime import driver

MAX_TOKENS = 256  # the most for which a fused kernel pays
MAX_GATED = 128  # the most of one tile of a large `medium_linear`
MAX_PAIRED = 4  # the most whose experts are computed pair by pair
MAX_PAIRED_MXFP4 = 2  # the same of experts in MXFP4
MAX_PAIRED_BYTES = 1  # and of experts in 8 bits
MAX_ROUTED = 8  # the most whose experts are chosen where the router's logits are computed
MAX_ROUTED_FEATURES = 4096  # a row of which fits the registers of a warp
MAX_SMALL = 64  # tokens of the largest bucket of `small_linear`
MAX_PLAIN = 1  # tokens up to which 8-bit weights are multiplied without tensor cores
MAX_BYTES_SMALL = 16  # tokens up to which `small_linear` multiplies 8-bit weights with 8-bit inputs
MAX_CONVERTED_SMALL = 128  # and 8-bit weights that it converts
_LARGE = 64 << 20  # bytes of weights from which a layer's time is all bandwidth, even for MAX_SMALL tokens
_SMALL = 16 << 20  # bytes of weights up to which it is all latency
_MODERATE = 24 << 20  # bytes of weights up to which one or two tokens are multiplied without tensor cores


@dataclass(frozen=True, slots=True)
class LinearTile:
    """One program: `block_m` tokens (of few: all) and `block_n` weight rows, `block_k` features at a time."""

    block_m: int  # tokens, padded; 4 and fewer go without tensor cores
    block_n: int
    block_k: int
    num_warps: int
    stages: int  # steps of k in flight
    split_k: int = 1  # programs that share the features of one tile
    scaled: bool = False  # 4-bit weights are scaled, not their sums


@dataclass(frozen=True, slots=True)
class PairTile:
    """One program of a product of one token and one or all of its experts: `block_n` outputs, `block_k` features of
    each expert at a time."""

    block_n: int
    block_k: int
    num_warps: int
    ahead: int = 0  # steps of k whose weights are loaded while the previous kernel is running
    split: int = 0  # warps that share the features of quantized rows, with tensor cores; 0: another way


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """One program of a grouped product: a block of pairs and `block_n` weight rows, `block_k` features at a time."""

    block_n: int
    block_k: int
    num_warps: int
    stages: int
    weights_left: bool  # weights, not pairs, are the left operand: for blocks of few pairs
    quantize_first: bool = False  # inputs of 8-bit weights are quantized in a separate kernel


@dataclass(frozen=True, slots=True)
class ElementTile:
    """One program of a kernel that works element by element."""

    block: int
    num_warps: int


ACTIVATE_TILE = ElementTile(block=2048, num_warps=4)


@dataclass(frozen=True, slots=True)
class NormTile:
    """One program of a layer norm: `rows` tokens."""

    rows: int
    num_warps: int


def choose_norm(num_features: int) -> NormTile:
    """Return a tile with two 16-byte loads (8 elements of 2 bytes) per thread."""
    return NormTile(rows=2, num_warps=max(1, min(16, _padded(num_features) // 256)))


def token_bucket(num_tokens: int) -> int:
    """Pad the number of tokens, so that few kernels are compiled: tensor cores take as long for 16 as for 3."""
    return num_tokens if num_tokens <= 2 else max(16, 1 << (num_tokens - 1).bit_length())


def pays_small(num_tokens: int, num_rows: int, num_features: int, itemsize: int, medium: bool) -> bool:
    """Return whether `small_linear` beats a norm, cuBLAS and a gate in a row, and `medium_linear` if available."""
    size = num_rows * num_features * itemsize
    # With more tokens only long rows pay: there are too few programs for anything else.
    if size >= _LARGE and num_features > num_rows:
        return num_tokens <= MAX_SMALL
    return num_tokens <= (MAX_SMALL // 4 if medium and itemsize == 2 and size <= _SMALL else MAX_SMALL // 2)


def pays_medium(num_tokens: int, num_rows: int, num_features: int, itemsize: int, gated: bool) -> bool:
    """Return the same for `medium_linear`. The more the tensor cores are the limit, the better is cuBLAS; but up to one
    tile of tokens, a fused gate makes up for it."""
    small = num_rows * num_features * itemsize <= _SMALL
    return itemsize == 2 and num_tokens <= (MAX_TOKENS if small else MAX_GATED if gated else MAX_SMALL)


# The interpreter stands in for the chip that the tables below were made for.


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to one program."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def can_describe(x: Tensor, weight: Tensor) -> bool:
    """Return whether the chip's copy engine (TMA) can fetch tiles of these tensors."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.element_size() <= 2 and x.shape[1] * x.element_size() % 16 == 0


@functools.cache
def choose_small(
    num_tokens: int, num_rows: int, num_features: int, itemsize: int, num_sms: int, shared_bytes: int
) -> LinearTile:
    """Return the tile of `small_linear` for weights [num_rows, num_features] and a bucket of tokens (measured on H200).

    `shared_bytes` is the chip's `shared_memory`.
    """
    if itemsize == 4:
        if num_tokens <= 2:
            return LinearTile(
                block_m=num_tokens, block_n=4, block_k=min(1024, _padded(num_features)), num_warps=4, stages=1
            )
        return LinearTile(block_m=max(num_tokens, 16), block_n=32, block_k=32, num_warps=4, stages=2)
    if num_tokens <= 2 and num_rows * num_features * itemsize <= _SMALL:
        # A whole row at once if it fits: 4096 weights, 64 registers per thread, for one warp.
        block_k = 1024 if num_tokens == 1 else 4096
        block_k = min(block_k, _padded(num_features))
        return LinearTile(
            block_m=num_tokens,
            block_n=2 * num_tokens,
            block_k=block_k,
            num_warps=max(1, block_k // 1024),
            stages=1,
        )
    if num_tokens <= 2 and num_rows * num_features * itemsize <= _MODERATE:
        # Tiles for tensor cores would be too few to read all of it at full bandwidth.
        block_k = min(2048, _padded(num_features))
        return LinearTile(block_m=num_tokens, block_n=2, block_k=block_k, num_warps=3 - num_tokens, stages=1)
    if num_tokens <= 16:
        num_tiles = -(-num_rows // 64)
        if num_tiles > num_sms:
            return LinearTile(block_m=16, block_n=64, block_k=128, num_warps=4, stages=5)
        split_k = _split_k(num_sms, num_tiles, num_features // 256)
        # One more stage is faster, except for products split in two.
        deeper = split_k != 2 and shared_bytes >= 4 * 256 * (16 + 64) * itemsize
        return LinearTile(
            block_m=16, block_n=64, block_k=256, split_k=split_k, num_warps=4, stages=4 if deeper else 3
        )
    if num_tokens <= 32:
        split_k = _split_k(2 * num_sms, -(-num_rows // 64), num_features // 128)
        return LinearTile(block_m=32, block_n=64, block_k=128, split_k=split_k, num_warps=4, stages=4)
    if num_rows < 128 * num_sms:
        split_k = _split_k(2 * num_sms, -(-num_rows // 64), num_features // 128)
        return LinearTile(block_m=64, block_n=64, block_k=128, split_k=split_k, num_warps=4, stages=3)
    return LinearTile(block_m=64, block_n=128, block_k=64, num_warps=4, stages=4)


@functools.cache
def choose_small_bytes(
    num_tokens: int, num_rows: int, num_features: int, group: int, num_sms: int, shared_bytes: int
) -> LinearTile:
    """Return the tile of `small_linear` for 8-bit weights (measured on H200)."""
    block_m = max(16, num_tokens)
    block_n = 128 if num_rows >= 128 * num_sms else 64
    # More features of more tokens are more than the registers hold.
    block_k = group or (128 if block_n == 128 or num_tokens > 16 else 256)
    num_tiles = -(-num_rows // block_n)
    split_k = min(
        4, _split_k((3 if block_m == 16 else 2) * num_sms, num_tiles, num_features // (2 * block_k))
    )
    # All programs of a multiprocessor should be resident, if there are few.
    resident = min(3, -(-num_tiles * split_k // num_sms))
    stage_bytes = block_n * block_k + 2 * block_m * block_k
    stages = max(2, min(4, shared_bytes // (resident * stage_bytes)))
    return LinearTile(block_m, block_n, block_k, num_warps=4, stages=stages, split_k=split_k)


def choose_small_codes(num_tokens: int, num_rows: int, num_features: int) -> LinearTile:
    """Return the tile of `small_linear` for 8-bit weights without tensor cores."""
    if num_rows * num_features >= _LARGE:
        return LinearTile(
            num_tokens, block_n=8, block_k=min(2048, _padded(num_features)), num_warps=4, stages=1
        )
    if 2048 < num_features <= 4096:  # whole rows at once
        return LinearTile(num_tokens, block_n=2, block_k=4096, num_warps=2, stages=1)
    return LinearTile(num_tokens, block_n=4, block_k=min(2048, _padded(num_features)), num_warps=4, stages=1)


@functools.cache
def choose_small_int4(
    num_tokens: int, num_rows: int, num_features: int, group: int, num_sms: int, shared_bytes: int
) -> LinearTile:
    """Return the tile of `small_linear` for 4-bit weights."""
    wide, block_m = num_rows >= 128 * num_sms, min(128, max(16, num_tokens))
    if num_tokens <= 32:
        # Tiles of 128 rows convert with fewer instructions, if there are enough of them or they can be split often.
        few = num_tokens <= 16 and 8 * -(-num_rows // 128) <= 2 * num_sms
        block_n = 128 if wide or few else 64
        block_k = 256 if num_features % 256 == 0 else 128
        programs, num_warps, most = (2 if few else 3), 4, 4
    else:
        block_n, block_k = 64 if num_tokens <= 64 and not wide else 128, 128
        long = num_tokens > 128 and num_features > num_rows
        programs, num_warps = (2, 4) if block_n == 64 or long else (1, 4 if wide and num_tokens > 64 else 8)
        most = 3 if block_m == 128 and num_warps == 4 else 4
    num_tiles = -(-num_rows // block_n) * -(-num_tokens // block_m)
    split_k = _split_k(programs * num_sms, num_tiles, num_features // (2 * block_k))
    resident = 1 if block_m == 128 else min(programs, -(-num_tiles * split_k // num_sms))
    stage_bytes = block_n * block_k // 2 + 2 * block_m * block_k + 4 * block_n * block_k // group
    stages = max(2, min(most, shared_bytes // (resident * stage_bytes)))
    return LinearTile(block_m, block_n, block_k, num_warps, stages, split_k=split_k, scaled=num_tokens > 32)


@functools.cache
def choose_medium(
    num_tokens: int,
    num_rows: int,
    num_features: int,
    itemsize: int,
    num_sms: int,
    shared_bytes: int,
    group: int = 0,
) -> LinearTile:
    """Return the tile of `medium_linear`, with about one program per multiprocessor over all tiles of tokens.

    `shared_bytes` is the chip's `shared_memory`, and `group` that of quantized weights.
    """
    if itemsize == 4:
        return LinearTile(block_m=64, block_n=32, block_k=32, num_warps=4, stages=2)
    if itemsize == 1:
        tile = _choose_medium_bytes(num_tokens, num_rows, num_features, num_sms, group)
        most = shared_bytes // ((tile.block_m + tile.block_n) * tile.block_k)
        return replace(tile, stages=max(2, min(tile.stages, most)))
    if num_rows >= 128 * num_sms:
        if num_tokens <= 64:
            return LinearTile(block_m=64, block_n=128, block_k=64, num_warps=4, stages=7)
        return LinearTile(block_m=128, block_n=256, block_k=64, num_warps=8, stages=4)
    # The smallest tiles that leave at most one per multiprocessor.
    for block_m, block_n, stages in ((64, 32, 5), (64, 64, 6), (128, 64, 4)):
        num_tiles = -(-num_tokens // block_m) * -(-num_rows // block_n)
        if num_tiles <= num_sms:
            # With more tiles, splitting in two was faster for rows of 3072 features and slower for 2048.
            shortest = 256 if 4 * num_tiles <= num_sms else 1536
            split_k = _split_k(num_sms, num_tiles, num_features // shortest)
            if block_n == 32 and split_k <= 2:
                stages = 8  # all 1024 features of a row are in flight at once
            return LinearTile(
                block_m=block_m, block_n=block_n, block_k=128, split_k=split_k, num_warps=4, stages=stages
            )
    return LinearTile(block_m=128, block_n=128, block_k=64, num_warps=8, stages=6)


def _choose_medium_bytes(
    num_tokens: int, num_rows: int, num_features: int, num_sms: int, group: int
) -> LinearTile:
    """Return the tile for fp8 or int8 (measured with fp8 up to MAX_TOKENS, a guess beyond)."""
    if num_tokens > MAX_TOKENS:
        # The largest tiles that leave one for each multiprocessor. Groups need the registers for their sums.
        widths = [width for width in (256, 128) if not (group and width == 256)]
        token_tiles = -(-num_tokens // 128)
        fits = [width for width in widths if token_tiles * -(-num_rows // width) >= num_sms]
        return LinearTile(128, (*fits, 64)[0], 128, num_warps=8, stages=4)
    wide, long = num_rows >= 128 * num_sms, num_features > num_rows
    if num_tokens <= 64:
        if wide:
            tile = LinearTile(64, 128, 128, num_warps=4, stages=4)
        elif 2 * -(-num_rows // 64) <= num_sms:
            tile = LinearTile(64, 64, 256, num_warps=4, stages=6, split_k=2)
        else:
            tile = LinearTile(64, 32, 256, num_warps=4, stages=4)
    elif num_tokens <= 128:
        if wide:
            tile = LinearTile(128, 64, 128, num_warps=8, stages=4)
        elif long:
            tile = LinearTile(64, 128, 256, num_warps=8, stages=4, split_k=2)
        elif -(-num_rows // 32) <= num_sms:
            tile = LinearTile(64, 32, 256, num_warps=4, stages=4)
        else:
            tile = LinearTile(64, 32, 128, num_warps=4, stages=6)
    elif wide:
        tile = LinearTile(128, 64, 128, num_warps=8, stages=3)
    elif long:
        tile = LinearTile(128, 128, 128, num_warps=8, stages=6, split_k=2)
    else:
        tile = LinearTile(64, 64, 128, num_warps=4, stages=6)
    return replace(tile, block_k=group) if group else tile


def pays_medium_fp8(num_tokens: int, num_rows: int, num_features: int) -> bool:
    """Return whether `medium_linear` beats cuBLAS and kernels around it for fp8 weights and inputs."""
    return num_tokens <= MAX_GATED or num_rows <= num_features


def choose_pairs(top_k: int, hidden: int, inner: int, itemsize: int) -> tuple[PairTile, PairTile]:
    """Return the tiles of `pair_gate_up` and `pair_down`."""
    gate_up = PairTile(block_n=1, block_k=min(4096 // itemsize, _padded(hidden)), num_warps=2)
    # 64 weights per thread and step. More steps ahead take registers from other programs.
    block_k = max(16, min(4096 // itemsize // (1 << (top_k - 1).bit_length()), _padded(inner)))
    return gate_up, PairTile(block_n=4, block_k=block_k, num_warps=4, ahead=1)


def choose_shared_pairs(top_k: int, hidden: int, inner: int) -> tuple[PairTile, PairTile]:
    """Return the same for weights whose rows warps can share: see `shared_rows.py`."""
    experts = 1 << (top_k - 1).bit_length()
    # Programs of 8 outputs: gate and up are 16 rows, what tensor cores multiply at once.
    gate_up = _shared_pair(block_n=8, experts=1, num_warps=4, num_features=hidden)
    return gate_up, _shared_pair(block_n=16, experts=experts, num_warps=8, num_features=inner)


def choose_byte_pairs(hidden: int, inner: int) -> tuple[PairTile, PairTile]:
    """Return the same for other 8-bit weights."""
    gate_up = PairTile(block_n=2, block_k=min(2048, _padded(hidden)), num_warps=2, ahead=1)
    block_k = min(256, _padded(inner))
    return gate_up, PairTile(block_n=8, block_k=block_k, num_warps=8, ahead=min(3, -(-inner // block_k)))


def _shared_pair(block_n: int, experts: int, num_warps: int, num_features: int) -> PairTile:
    """Return a tile whose warps share the rows of each expert, if there are fewer experts than warps."""
    split = max(1, num_warps // experts)
    steps = -(-num_features // (256 * split))
    # Three steps of 16 rows, with what they are multiplied with, fill 128 registers.
    return PairTile(block_n, 256, min(16, experts * split), ahead=min(3, steps), split=split)


def choose_grouped(num_pairs: int, num_experts: int, itemsize: int) -> tuple[int, GroupedTile, GroupedTile]:
    """Return the pairs of a block, and the tiles of `grouped_gate_up` and `grouped_down`."""
    if itemsize == 4:
        tile = GroupedTile(block_n=32, block_k=32, num_warps=4, stages=2, weights_left=True)
        return 16, tile, tile
    average = num_pairs / num_experts
    if average <= 32:
        tile = GroupedTile(block_n=64, block_k=128, num_warps=4, stages=3, weights_left=True)
        return 16 if average <= 10 else 32, tile, tile
    stages = 4 if average <= 128 else 3
    gate_up = GroupedTile(block_n=256, block_k=64, num_warps=8, stages=stages, weights_left=False)
    down = GroupedTile(block_n=256, block_k=64, num_warps=8, stages=4, weights_left=False)
    return 128, gate_up, down


def choose_grouped_mxfp4(num_pairs: int, num_experts: int) -> tuple[int, GroupedTile, GroupedTile]:
    """Return the same for MXFP4 (measured up to an average of 32 pairs)."""
    average = num_pairs / num_experts
    # Two warps, or blocks of 8 pairs, are slower: they cannot use the tensor cores' instructions for four warps.
    block_n = 64 if average <= 2 else 128
    tile = GroupedTile(block_n=block_n, block_k=128, num_warps=4, stages=4, weights_left=True)
    return 16 if average <= 8 else 32 if average <= 20 else 64, tile, tile


def choose_grouped_quantized(
    num_pairs: int, num_experts: int, converted: bool, step: int = 128
) -> tuple[int, GroupedTile, GroupedTile]:
    """Return the same for other quantized weights, which may be `converted`, `step` features at a time (measured with
    fp8 up to an average of 32 pairs)."""
    average = num_pairs / num_experts
    if average <= 32:
        # Few rows are quantized where they are multiplied: again and again, but without another kernel.
        tile = GroupedTile(
            block_n=64, block_k=128, num_warps=4, stages=4, weights_left=True, quantize_first=num_pairs > 16
        )
        return 16 if average <= 10 else 32, tile, tile
    # Converted weights stay in registers only as the left operand.
    block_m = 64 if average <= 64 else 128
    stages = 2 if block_m * step > 128 * 128 else 3  # of what shared memory holds
    tile = GroupedTile(
        block_n=128, block_k=128, num_warps=8, stages=stages, weights_left=converted, quantize_first=True
    )
    return block_m, tile, tile


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _split_k(num_programs: int, num_tiles: int, num_steps: int) -> int:
    """Return how many programs share a tile of `num_steps` steps, for about `num_programs` in total."""
    return max(1, min(8, num_programs // num_tiles, num_steps))
