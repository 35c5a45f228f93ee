"""Threads: placement on NUMA nodes, and many jobs on more threads than there are processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.layers.native.library import native_library, numa_nodes

# Helpers stay where they were placed, so this runs in its own process. Both halves of a weight are asked for from
# the one node that every machine has.
PLACED = """
import os, torch
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.native.library import native_library

library = native_library()
processors = sorted(os.sched_getaffinity(0))
library._place_team({0: processors[:1], 1: processors[-1:]})
library.threads = 6
for dtype in (torch.float32, torch.bfloat16):
    weight, x = torch.randn(4096, 1024).to(dtype), torch.randn(20, 1024)
    linear = NativeKernels(library).linear(1024, 4096, dtype, bias=False)
    linear.load(weight)
    for _ in range(200):
        first = linear(x)
    library.threads = 1
    assert torch.equal(linear(x), first)
    library.threads = 6
print("done")
"""


def test_processors_are_grouped_by_node(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    for node, listed in ((0, f"{usable[0]}"), (1, "100000-100003,100007"), (10, f"{usable[-1]},200000")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{listed}\n")
    assert numa_nodes(tmp_path) == {0: usable[:1], 10: usable[-1:]}, "others may not be used here"
    assert numa_nodes(tmp_path / "missing") == {}


@pytest.mark.skipif(native_library() is None, reason="nothing can be compiled here")
def test_placed_and_crowded_threads_compute_the_same() -> None:
    run = subprocess.run([sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=100)
    assert run.stdout.strip() == "done", run.stderr
