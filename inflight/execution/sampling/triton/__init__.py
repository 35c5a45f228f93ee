"""Sampling in four kernel launches that a CUDA graph can hold, whatever the rows ask for."""

from inflight.execution.sampling.triton.draw import (
    MAX_LOGPROBS,
    SamplingWorkspace,
    WantedLogprobs,
    draw,
    read_logprobs,
    score_all,
)
from inflight.execution.sampling.triton.rows import DrawRows

__all__ = [
    "MAX_LOGPROBS",
    "DrawRows",
    "SamplingWorkspace",
    "WantedLogprobs",
    "draw",
    "read_logprobs",
    "score_all",
]
