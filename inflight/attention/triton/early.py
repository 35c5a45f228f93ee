"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits only where it must.

Before `begin_early` a kernel may read what the host wrote before the step's first kernel, and constants. Every
program calls it, even one without work: a kernel that is done then means that all before it are done. Hopper and
later; elsewhere `EARLY` is False and nothing of this is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch needs beside its arguments; the interpreter and older chips do not know the option."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(pointers, num_bytes):
    """Bring `num_bytes` (a multiple of 16) from each of `pointers` (aligned to 16) into L2, without waiting."""
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointers.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1
    )
