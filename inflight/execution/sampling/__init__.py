"""Sampling: permanent parameters per row, one token per row and step.

`Sampler` over `SamplingRows` is written in torch; `cpu_sampler` prefers the compiled library.
"""

from inflight.execution.sampling.interface import (
    HAS_NO_TOKEN,
    IS_NOT_FINITE,
    HostSample,
    LogprobTensors,
    SampledTensors,
)
from inflight.execution.sampling.native import NativeSampler, NativeSamplingRows, cpu_sampler
from inflight.execution.sampling.sampler import Sampler, SamplingRows

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
    "cpu_sampler",
]
