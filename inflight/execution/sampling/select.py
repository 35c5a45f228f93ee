"""Who samples on a CPU, and who scores prompts: the compiled library, or torch where it cannot be had."""

from __future__ import annotations

from torch import Tensor

from inflight.execution.sampling.logprobs import LogprobTensors, score
from inflight.execution.sampling.native import NativeSampler, NativeSamplingRows, native_score
from inflight.execution.sampling.rows import SamplingRows
from inflight.execution.sampling.sampler import Sampler
from inflight.native.library import native_library


def cpu_sampler(max_rows: int, vocab_size: int) -> NativeSampler | Sampler:
    library = native_library()
    if library is None:
        return Sampler(SamplingRows(max_rows, vocab_size, "cpu"))
    return NativeSampler(library, NativeSamplingRows(max_rows, vocab_size))


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num: int) -> LogprobTensors:
    """The prompt tokens target_ids [P] int64 and the top `num` under logits [P, V] that predict them."""
    num = min(num, logits.shape[1])
    library = native_library() if logits.device.type == "cpu" else None
    if library is None:
        return score(logits, target_ids, (num,) * len(logits))
    return native_score(library, logits, target_ids, num)
