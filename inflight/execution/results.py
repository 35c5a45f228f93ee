"""What a step leaves behind, from the device to the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from inflight.events import RequestFailure
from inflight.execution.sampling import IS_NOT_FINITE, LogprobTensors, SampledTensors
from inflight.scheduling import Admission, Batch, Sampled

# Prompt positions whose logits are held at once when their logprobs are asked for.
PROMPT_LOGITS_AT_ONCE = 64

NOT_FINITE = RequestFailure("logits_not_finite", "the model's logits are not finite")
VECTOR_NOT_FINITE = RequestFailure("logits_not_finite", "the numbers of the model's head are not finite")
NO_TOKEN = RequestFailure("no_token_allowed", "no token is allowed by the parameters")


def failure(bad: int) -> RequestFailure:
    """Of an entry that is bad, by how it is."""
    return NOT_FINITE if bad == IS_NOT_FINITE else NO_TOKEN


class StepVectors(NamedTuple):
    """What the model's head returned for the entries of kind "pool" that end in a step."""

    entries: list[int]
    vectors: Tensor  # [len(entries), size] float32, in host memory or on their way there

    def read_into(self, result: Sampled) -> None:
        """A vector with NaN or inf in it fails its own request, as such logits do."""
        finite = self.vectors.isfinite().all(-1).tolist()
        for entry, vector, is_finite in zip(self.entries, self.vectors.numpy(), finite, strict=True):
            if is_finite:
                result.vectors[entry] = vector.tobytes()
            else:
                result.errors[entry] = VECTOR_NOT_FINITE


@dataclass(slots=True)
class Ticket:
    """A launched step, still on the device."""

    num_entries: int
    sampling_entries: list[int]
    sampled: SampledTensors | None  # None when no entry samples
    prompt_logprobs: dict[int, list[LogprobTensors]]  # by entry, in order of position
    pooled: StepVectors | None = None  # None when no entry ends with a vector
    failures: dict[int, RequestFailure] = field(default_factory=dict)  # of samples whose constraint failed

    def read(self) -> Sampled:
        """Waits for the device where the tensors are still on it."""
        result = Sampled([[] for _ in range(self.num_entries)])
        if self.sampled is not None:
            sample = self.sampled.to_host()
            for index, entry in enumerate(self.sampling_entries):
                result.token_ids[entry] = [sample.token_ids[index]]
                if sample.bad[index]:
                    result.errors[entry] = self.failures.get(index) or failure(sample.bad[index])
            result.logprobs = {
                self.sampling_entries[index]: [found] for index, found in sample.logprobs.items()
            }
        for entry, parts in self.prompt_logprobs.items():
            result.prompt_logprobs[entry] = [position for part in parts for position in part.to_host()]
        if self.pooled is not None:
            self.pooled.read_into(result)
        return result


class PromptPiece(NamedTuple):
    """A run of prompt tokens whose logprobs are asked for: each is predicted by the token before it."""

    entry: int
    row: int
    first_token: int  # of the step: the one that predicts the first of them
    first_position: int  # of the first of them, in the row
    size: int
    wanted: int  # how many of the most likely tokens to tell beside each

    @property
    def predicting(self) -> slice:
        """Tokens of the step."""
        return slice(self.first_token, self.first_token + self.size)

    @property
    def targets(self) -> slice:
        """Positions in the row."""
        return slice(self.first_position, self.first_position + self.size)


class ScoredRows:
    """The rows whose requests ask for logprobs of their prompts."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, int]] = {}  # row: number of logprobs, number of prompt tokens

    def admit(self, admissions: Sequence[Admission]) -> None:
        for row, request in admissions:
            if request.params.prompt_logprobs is None:
                self._asked.pop(row, None)
            else:
                self._asked[row] = request.params.prompt_logprobs, request.num_prompt_tokens

    def any_in(self, batch: Batch) -> bool:
        """Whether this step computes prompt tokens of a request that asks for their logprobs."""
        return bool(self._asked) and any(
            row in self._asked and start < self._asked[row][1] - 1
            for row, start in zip(batch.rows, batch.starts, strict=True)
        )

    def pieces(self, batch: Batch, most: int = PROMPT_LOGITS_AT_ONCE) -> Iterator[PromptPiece]:
        """The prompt tokens that this step predicts, of the entries that ask, a bounded number at a time."""
        most = min(most, PROMPT_LOGITS_AT_ONCE)
        first = 0
        for entry, (row, start, count) in enumerate(zip(batch.rows, batch.starts, batch.counts, strict=True)):
            wanted, num_prompt_tokens = self._asked.get(row, (0, 0))
            num_targets = min(start + count, num_prompt_tokens - 1) - start
            for at in range(0, num_targets, most):
                size = min(most, num_targets - at)
                yield PromptPiece(entry, row, first + at, start + at + 1, size, wanted)
            first += count


class PooledRows:
    """The rows whose requests end with a vector from the model's head."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # row: number of prompt tokens

    def admit(self, admissions: Sequence[Admission]) -> None:
        for row, request in admissions:
            if request.kind == "pool":
                self._lengths[row] = request.num_prompt_tokens
            else:
                self._lengths.pop(row, None)

    def ending(self, batch: Batch) -> list[int]:
        """The entries whose last token this step computes. Their rows are forgotten: whoever runs again is admitted
        again, and steps of other requests look at nothing."""
        if not self._lengths:
            return []
        entries = [
            entry
            for entry, (row, start, count) in enumerate(
                zip(batch.rows, batch.starts, batch.counts, strict=True)
            )
            if self._lengths.get(row) == start + count
        ]
        for entry in entries:
            del self._lengths[batch.rows[entry]]
        return entries
