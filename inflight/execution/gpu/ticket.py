"""A launched step on a GPU, and what is read of it once it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.events import PositionLogprobs, RequestFailure
from inflight.execution.results import StepVectors, failure
from inflight.execution.sampling.triton import read_logprobs
from inflight.scheduling import Sampled


class ToldLogprobs(NamedTuple):
    """Log-probabilities on their way to host memory, as `read_logprobs` reads them."""

    results: Tensor
    counts: list[int]
    width: int

    def read(self) -> list[PositionLogprobs]:
        return read_logprobs(self.results, self.counts, self.width)


@dataclass(slots=True)
class GpuTicket:
    """A launched step. Its results are on their way to host memory, and there once `done` has happened."""

    num_entries: int
    sampling_entries: list[int]
    # [2, S] int32 in host memory, padded: token ids, and whether and how the entry is bad.
    drawn: Tensor | None
    logprobs: ToldLogprobs | None  # of `logprob_entries`, in order
    logprob_entries: list[int]
    prompt_logprobs: list[tuple[int, ToldLogprobs]]  # by entry, in order of position
    pooled: StepVectors | None
    done: torch.cuda.Event | None  # None where there is nothing to wait for
    failures: dict[int, RequestFailure] = field(default_factory=dict)  # of samples whose constraint failed

    def token_ids(self) -> list[int]:
        """Those that were drawn, and some padding."""
        assert self.drawn is not None
        if self.done is not None:
            self.done.synchronize()
        token_ids: list[int] = self.drawn[0].tolist()
        return token_ids

    def read(self) -> Sampled:
        if self.done is not None:
            self.done.synchronize()
        result = self._read_tokens()
        if self.logprobs is not None:
            told = zip(self.logprob_entries, self.logprobs.read(), strict=True)
            result.logprobs = {entry: [position] for entry, position in told}
        for entry, piece in self.prompt_logprobs:
            result.prompt_logprobs.setdefault(entry, []).extend(piece.read())
        if self.pooled is not None:
            self.pooled.read_into(result)
        return result

    def _read_tokens(self) -> Sampled:
        if self.drawn is None:
            return Sampled([[] for _ in range(self.num_entries)])
        token_ids, bad = self.drawn.tolist()
        entries = self.sampling_entries
        drawn = [[token_id] for token_id in token_ids[: len(entries)]]
        if len(entries) < self.num_entries:
            by_entry = dict(zip(entries, drawn, strict=True))
            drawn = [by_entry.get(entry, []) for entry in range(self.num_entries)]
        result = Sampled(drawn)
        if any(bad):
            result.errors = {
                entry: self.failures.get(place) or failure(how)
                for place, (entry, how) in enumerate(zip(entries, bad, strict=False))
                if how
            }
        return result
