"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits only where it must.

Every kernel launched with these options calls `launch_dependents_then_wait`, in every program, even one without work: a
kernel that is done then means that all before it are done. Before the call it may read constants (weights, say) and
what the host wrote before the step's first kernel, and nothing that another kernel of the step writes, but for one: a
kernel that calls `wait_then_launch_dependents` instead lets no later one start before all ahead of itself are done.
Block tables are written by the step's first kernel, and its second, the lookup of embeddings, waits first: all others
may read tables at any time.

Hopper and later; elsewhere, and in the interpreter, `PDL` is False and nothing of this is compiled.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch needs beside its arguments; the interpreter and older chips do not know the option."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def launch_dependents_then_wait(PDL: tl.constexpr):
    """Let the next kernel start, and wait until all before are done and their writes can be seen."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_then_launch_dependents(PDL: tl.constexpr):
    """Wait until all before are done and their writes can be seen, then let the next kernel start."""
    wait(PDL)
    launch_dependents(PDL)


@triton.jit
def wait(PDL: tl.constexpr):
    """The first half of `wait_then_launch_dependents`, for kernels that have more to wait for."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """The second half. A kernel that ends without it lets the next one start then."""
    if PDL:
        gdc_launch_dependents()
