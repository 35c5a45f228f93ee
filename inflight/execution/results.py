"""Results that runners of all devices share: failures, vectors, and the rows that want prompt logprobs or vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from inflight.events import RequestFailure
from inflight.execution.sampling import IS_NOT_FINITE
from inflight.scheduling import Admission, Batch, Sampled

# Prompt positions whose logits are held at once for prompt logprobs.
PROMPT_LOGITS_AT_ONCE = 64

NOT_FINITE = RequestFailure("logits_not_finite", "the model's logits are not finite")
VECTOR_NOT_FINITE = RequestFailure("logits_not_finite", "the output of the model's head is not finite")
NO_TOKEN = RequestFailure("no_token_allowed", "the sampling parameters allow no token")


def failure(bad: int) -> RequestFailure:
    """Return why sampling an entry failed."""
    return NOT_FINITE if bad == IS_NOT_FINITE else NO_TOKEN


class StepVectors(NamedTuple):
    """The head's output for the entries of kind "pool" that end in a step."""

    entries: list[int]
    vectors: Tensor  # [len(entries), size] float32, in host memory or being copied there

    def read_into(self, result: Sampled) -> None:
        """Add the vectors to a result. A vector with NaN or inf fails only its own request."""
        finite = self.vectors.isfinite().all(-1).tolist()
        for entry, vector, is_finite in zip(self.entries, self.vectors.numpy(), finite, strict=True):
            if is_finite:
                result.vectors[entry] = vector.tobytes()
            else:
                result.errors[entry] = VECTOR_NOT_FINITE


class PromptPiece(NamedTuple):
    """A run of prompt tokens to score. Each is predicted by the token before it."""

    entry: int
    row: int
    first_token: int  # index in the step of the token that predicts the first of them
    first_position: int  # position of the first of them in the row
    size: int
    num_logprobs: int  # most likely tokens to report beside each

    @property
    def predicting(self) -> slice:
        """The predicting tokens, as indices in the step."""
        return slice(self.first_token, self.first_token + self.size)

    @property
    def targets(self) -> slice:
        """The scored tokens, as positions in the row."""
        return slice(self.first_position, self.first_position + self.size)


class ScoredRows:
    """The rows whose requests want logprobs of their prompts."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, int]] = {}  # row: number of logprobs, number of prompt tokens

    def admit(self, admissions: Sequence[Admission]) -> None:
        for row, request in admissions:
            if request.params.prompt_logprobs is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = request.params.prompt_logprobs, request.num_prompt_tokens

    def any_in(self, batch: Batch) -> bool:
        """Return whether this step computes prompt tokens that must be scored."""
        return bool(self._rows) and any(
            row in self._rows and start < self._rows[row][1] - 1
            for row, start in zip(batch.rows, batch.starts, strict=True)
        )

    def pieces(self, batch: Batch, most: int = PROMPT_LOGITS_AT_ONCE) -> Iterator[PromptPiece]:
        """Yield the prompt tokens to score that this step predicts, a bounded number at a time."""
        most = min(most, PROMPT_LOGITS_AT_ONCE)
        first = 0
        for entry, (row, start, count) in enumerate(zip(batch.rows, batch.starts, batch.counts, strict=True)):
            num_logprobs, num_prompt_tokens = self._rows.get(row, (0, 0))
            num_targets = min(start + count, num_prompt_tokens - 1) - start
            for at in range(0, num_targets, most):
                size = min(most, num_targets - at)
                yield PromptPiece(entry, row, first + at, start + at + 1, size, num_logprobs)
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
        """Return the entries whose last token this step computes, and forget their rows.

        A request that runs again is admitted again, and steps of other requests need no lookups.
        """
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
