"""Sampling: permanent parameters a row (`SamplingRows`), one token a row and step (`Sampler`)."""

from inflight.execution.sampling.logprobs import LogprobTensors, prompt_logprobs
from inflight.execution.sampling.rows import SamplingRows
from inflight.execution.sampling.sampler import (
    HAS_NO_TOKEN,
    IS_NOT_FINITE,
    HostSample,
    SampledTensors,
    Sampler,
)

__all__ = [
    "HAS_NO_TOKEN",
    "IS_NOT_FINITE",
    "HostSample",
    "LogprobTensors",
    "SampledTensors",
    "Sampler",
    "SamplingRows",
    "prompt_logprobs",
]
