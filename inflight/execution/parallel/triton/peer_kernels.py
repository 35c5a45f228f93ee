"""Sums and gathers of ranks on GPUs, each as one kernel over memory that all ranks can read.

A rank's buffer has two regions, used alternately, and flags that the other ranks write:

    flags [rank, program] int32 | region 0 | region 1

Exchanges are numbered. The number is in device memory and incremented by the kernel itself, so a captured step can be
replayed. Program p of a rank

    copies its part to the region of this number,
    writes the number to flag [rank, p] of all others       (release),
    waits until its own flags [*, p] reach the number       (acquire),
    and reads the same part of all ranks.

Two regions are enough: once a rank has all flags of an exchange, the others have finished reading the previous one,
since kernels of a device run one after another. All ranks launch the same kernels in the same order.

With programmatic dependent launch, a sum lets only the next kernel start while it waits for other ranks, not all that
follow: these would fill the device, and where ranks share a GPU, the kernels that are waited for could not run. A
gather lets none start early: the sampling kernels behind it have large programs, one for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.layers.triton_utils.pdl import launch_dependents, wait, wait_then_launch_dependents

# All programs of a kernel must be resident at the same time, or other ranks would wait forever. Every GPU has room for
# this many.
MAX_PROGRAMS = 64
_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def sum_kernel(
    x,  # [num_tokens, num_features]: this rank's part; without a residual, overwritten by the sum
    residual,  # [num_tokens, num_features] or None: what the sum is added to
    norm,  # [num_features] float32 or None: the sum is normalised first
    next_norm,  # [num_features] float32 or None: of the next layer, see `layers/triton/linear_parts.py`
    scaled,  # [num_tokens, num_features]
    squares,  # [num_tokens] float32
    peers,  # [SIZE] int64: the address of each rank's buffer
    lost,  # [1] int64: the address of an int32 that becomes nonzero when a rank is lost
    state,  # int32: the number of the last exchange; the programs that have finished this one
    rank,
    num_tokens,
    num_features,
    eps,
    region_bytes,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the parts in the order of the ranks, in float32."""
    column = tl.arange(0, BLOCK)
    mask = column < num_features
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    wait_then_launch_dependents(PDL)
    number = tl.load(state) + 1
    mine = _region(peers, rank, number, region_bytes, x.dtype.element_ty, SIZE)
    for token in range(program, num_tokens, num_programs):
        place = token * num_features + column  # a region is far smaller than 2 GiB
        tl.store(mine + place, tl.load(x + place, mask=mask), mask=mask)
    _wait_for_all(peers, lost, rank, program, number, SIZE)
    for token in range(program, num_tokens, num_programs):
        place = token * num_features + column
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            region = _region(peers, peer, number, region_bytes, x.dtype.element_ty, SIZE)
            total += tl.load(region + place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        if norm is not None:
            total *= tl.rsqrt(tl.sum(total * total, 0) / num_features + eps)
            total *= tl.load(norm + column, mask=mask, other=0.0)
        out = x
        if residual is not None:
            out = residual
            total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        values = total.to(x.dtype.element_ty)
        tl.store(out + place, values, mask=mask)
        if next_norm is not None:
            wide = values.to(tl.float32)
            factor = tl.load(next_norm + column, mask=mask, other=0.0)
            tl.store(scaled + place, (wide * factor).to(x.dtype.element_ty), mask=mask)
            tl.store(squares + token, tl.sum(wide * wide, 0))
    _finish(state, number)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def gather_kernel(
    x,  # [num_rows, the rank's columns] float32
    out,  # [num_rows, num_columns] float32
    peers,
    lost,
    state,
    rank,
    num_rows,
    num_columns,  # of all ranks together, divided evenly; the first ranks have one more if needed
    region_bytes,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather columns."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    wait(PDL)
    number = tl.load(state) + 1
    base, more = num_columns // SIZE, num_columns % SIZE
    num_blocks = tl.cdiv(base + 1, BLOCK)
    width = base + (rank < more).to(tl.int32)
    mine = _region(peers, rank, number, region_bytes, tl.float32, SIZE)
    for unit in range(program, num_rows * num_blocks, num_programs):
        row, column = unit // num_blocks, (unit % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        place = row * width + column
        tl.store(mine + place, tl.load(x + place, mask=mask), mask=mask)
    _wait_for_all(peers, lost, rank, program, number, SIZE)
    launch_dependents(PDL)
    for unit in range(program, num_rows * num_blocks, num_programs):
        row, column = unit // num_blocks, (unit % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        for peer in tl.static_range(SIZE):
            width = base + (peer < more).to(tl.int32)
            mask = column < width
            first = peer * base + tl.minimum(peer, more)
            region = _region(peers, peer, number, region_bytes, tl.float32, SIZE)
            values = tl.load(region + row * width + column, mask=mask, cache_modifier=".cg")
            tl.store(out + row * num_columns + first + column, values, mask=mask)
    _finish(state, number)


@triton.jit
def _region(peers, rank, number, region_bytes, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    address = tl.load(peers + rank) + SIZE * _MAX_PROGRAMS * 4 + (number & 1).to(tl.int64) * region_bytes
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def _flag(peers, owner, writer, program):
    """Return the flag that rank `writer` writes in the buffer of rank `owner`."""
    return tl.load(peers + owner).to(tl.pointer_type(tl.int32)) + writer * _MAX_PROGRAMS + program


@triton.jit
def _wait_for_all(peers, lost, rank, program, number, SIZE: tl.constexpr):
    """Wait until all ranks have arrived, or one is lost; then nobody reads the result."""
    tl.debug_barrier()  # all stores come before the flags that announce them
    for peer in tl.static_range(SIZE):
        if peer != rank:
            tl.atomic_xchg(_flag(peers, peer, rank, program), number, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != rank:
            flag = _flag(peers, rank, peer, program)
            polls, is_lost = 0, 0
            # Compare the difference, because numbers wrap around.
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number < 0) & (is_lost == 0):
                polls += 1
                if polls % 1024 == 0:  # reading host memory is slow
                    is_lost = tl.load(tl.load(lost).to(tl.pointer_type(tl.int32)), volatile=True)
    tl.debug_barrier()


@triton.jit
def _finish(state, number):
    """Let the last program to finish advance the number."""
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, number)
