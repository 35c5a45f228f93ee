"""Sampling for CUDA graphs: four kernel launches for any mix of parameters."""

from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.execution.sampling.triton.sample import (
    MAX_LOGPROBS,
    LogprobBuffers,
    SamplingBatch,
    SamplingWorkspace,
    read_logprobs,
    sample_tokens,
    score_all,
)

__all__ = [
    "MAX_LOGPROBS",
    "LogprobBuffers",
    "SamplingBatch",
    "SamplingWorkspace",
    "TritonSamplingRows",
    "read_logprobs",
    "sample_tokens",
    "score_all",
]
