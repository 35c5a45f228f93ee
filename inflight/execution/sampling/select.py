"""Who samples on a CPU: the compiled library, or torch where it cannot be had."""

from __future__ import annotations

from inflight.execution.sampling.native import NativeSampler, NativeSamplingRows, VocabularyPart
from inflight.execution.sampling.rows import SamplingRows
from inflight.execution.sampling.sampler import Sampler
from inflight.native.library import native_library


def cpu_sampler(
    max_rows: int, vocab_size: int, part: VocabularyPart | None = None
) -> NativeSampler | Sampler:
    """`part`: the logits that it is given, where ranks have some each; which takes the library."""
    library = native_library()
    if library is None:
        assert part is None
        return Sampler(SamplingRows(max_rows, vocab_size, "cpu"))
    return NativeSampler(library, NativeSamplingRows(max_rows, vocab_size), part)
