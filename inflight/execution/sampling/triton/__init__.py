"""Sampling in three kernel launches that a CUDA graph can hold, whatever the rows ask for."""

from inflight.execution.sampling.triton.draw import (
    SamplingWorkspace,
    WantedLogprobs,
    draw,
    read_logprobs,
    score,
)
from inflight.execution.sampling.triton.rows import DrawRows, token_bits

__all__ = ["DrawRows", "SamplingWorkspace", "WantedLogprobs", "draw", "read_logprobs", "score", "token_bits"]
