"""Programmatic dependent launch: a kernel starts while its predecessor is still running, and waits only where it must.

Every program of a kernel launched with these options must call `launch_dependents_then_wait`, even without work, so
that a finished kernel implies that all kernels before it are finished. Before the call, a kernel may read constants
(such as weights) and what the host wrote before the step's first kernel, but nothing that another kernel of the step
writes, with one exception: a kernel that calls `wait_then_launch_dependents` instead lets no later kernel start before
all its predecessors are finished. Block tables are written by the step's first kernel, and the second, the embedding
lookup, waits first: all others may read block tables at any time.

This needs Hopper or later. Elsewhere, and in the interpreter, `PDL` is False and none of this is compiled.
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
    """Return the extra keyword arguments of a launch; the interpreter and older chips do not know the option."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def launch_dependents_then_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait until all kernels before are finished and their writes are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_then_launch_dependents(PDL: tl.constexpr):
    """Wait until all kernels before are finished and their writes are visible, then let the next kernel start."""
    wait(PDL)
    launch_dependents(PDL)


@triton.jit
def wait(PDL: tl.constexpr):
    """Do the first half of `wait_then_launch_dependents`, for kernels that have more to wait for."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Do the second half. A kernel that ends without it lets the next one start at its end."""
    if PDL:
        gdc_launch_dependents()
