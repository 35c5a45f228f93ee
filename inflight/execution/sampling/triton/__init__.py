"""Sampling in three kernel launches that a CUDA graph can hold, whatever the rows ask for."""

from inflight.execution.sampling.triton.draw import DrawWorkspace, WantedLogprobs, draw, read_logprobs, score
from inflight.execution.sampling.triton.rows import DrawRows, token_bits

__all__ = ["DrawRows", "DrawWorkspace", "WantedLogprobs", "draw", "read_logprobs", "score", "token_bits"]
