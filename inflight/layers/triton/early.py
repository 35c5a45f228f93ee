"""Programmatic dependent launch: a kernel may start, and fetch its weights, while the one before it still runs.

Every kernel launched with `launch_pdl` must call `begin_early` before it touches anything that another kernel
writes. It lets the kernel after it start too, and returns when all kernels before it are done and their writes
can be seen. Hopper and later; in the interpreter, and on older chips, `EARLY` is False and nothing is compiled.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Lanes of one warp that ask for the same run of bytes ask once.
_FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


@functools.cache
def can_start_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch needs beside its arguments; interpreters and older chips do not know the option."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def fetch_into_l2(pointers, num_bytes):
    """Ask for `num_bytes` (a multiple of 16) from each of `pointers` (aligned to 16), without waiting."""
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointers.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def begin_early(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
