"""Sampling: permanent parameters per row, one token per row and step.

`Sampler` over `SamplingRows` does it in torch on any device; `cpu_sampler` gives the compiled one where it can be had.
"""

from inflight.execution.sampling.logprobs import LogprobTensors
from inflight.execution.sampling.native import NativeSampler, NativeSamplingRows, VocabularyPart
from inflight.execution.sampling.rows import SamplingRows
from inflight.execution.sampling.sampler import (
    HAS_NO_TOKEN,
    IS_NOT_FINITE,
    HostSample,
    SampledTensors,
    Sampler,
)
from inflight.execution.sampling.select import cpu_sampler

__all__ = [
    "HAS_NO_TOKEN",
    "IS_NOT_FINITE",
    "HostSample",
    "LogprobTensors",
    "NativeSampler",
    "NativeSamplingRows",
    "SampledTensors",
    "Sampler",
    "SamplingRows",
    "VocabularyPart",
    "cpu_sampler",
]
