"""Sampling in four kernel launches that a CUDA graph can hold, whatever the rows ask for; in six, by several ranks."""

from inflight.execution.sampling.triton.draw import (
    MAX_LOGPROBS,
    SamplingWorkspace,
    WantedLogprobs,
    draw,
    offer,
    read_logprobs,
    score_all,
)
from inflight.execution.sampling.triton.offers import OFFER
from inflight.execution.sampling.triton.rows import DrawRows

__all__ = [
    "MAX_LOGPROBS",
    "OFFER",
    "DrawRows",
    "SamplingWorkspace",
    "WantedLogprobs",
    "draw",
    "offer",
    "read_logprobs",
    "score_all",
]
