"""Sampling in two kernel launches that a CUDA graph can hold, for rows that ask for a draw and nothing else."""

from inflight.execution.sampling.rows import is_plain
from inflight.execution.sampling.triton.draw import SamplingWorkspace, draw

__all__ = ["SamplingWorkspace", "draw", "is_plain"]
