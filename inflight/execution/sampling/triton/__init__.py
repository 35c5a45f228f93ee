"""Sampling in four kernel launches that a CUDA graph can hold, whatever rows ask for; in eleven, by several ranks."""

from inflight.execution.sampling.triton.draw import Draws, WantedLogprobs, draw, read_logprobs, score_all
from inflight.execution.sampling.triton.ranks import RankTokens, draw_by_ranks
from inflight.execution.sampling.triton.rows import DrawRows
from inflight.execution.sampling.triton.workspace import MAX_LOGPROBS, SamplingWorkspace

__all__ = [
    "MAX_LOGPROBS",
    "DrawRows",
    "Draws",
    "RankTokens",
    "SamplingWorkspace",
    "WantedLogprobs",
    "draw",
    "draw_by_ranks",
    "read_logprobs",
    "score_all",
]
