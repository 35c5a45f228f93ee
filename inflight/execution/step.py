"""A step on the host, on all devices: the batch as arrays, the rows that want more than tokens, and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.events import RequestFailure
from inflight.execution.sampling.interface import IS_NOT_FINITE
from inflight.scheduling.batch import Admission, Batch, Sampled

Ints = NDArray[np.int32]


@dataclass(slots=True)
class HostStep:
    """A batch as arrays: B entries (the first `num_decodes` decode), T tokens and S samples.

    Where decodes are split, each of their tokens is an entry: a row with drafts then has several, and the batch's
    entries are counted differently. `sampling_entries` are always those of the batch.

    Sample i needs the hidden state of the step's token `sample_tokens[i]`. The first ones sample a token each, for
    `sampling_entries`, in which an entry may occur several times; the others belong to `pooled_entries`.
    """

    batch: Batch
    num_decodes: int
    num_tokens: int
    rows: Ints  # [B]
    context_lens: Ints  # [B]
    query_starts: Ints  # [B + 1]
    token_rows: Ints  # [T]
    positions: Ints  # [T]
    slot_mapping: Ints  # [num_tables, T]
    sampling_entries: list[int]
    sample_tokens: Ints  # [S]
    sample_rows: Ints  # [S], -1 where no token is sampled
    sample_lengths: Ints  # [S] the position that the sampled token will have
    draft_ids: Ints | None = (
        None  # [T] the tokens that are drafts, -1 for others; None: decodes are not split
    )
    pooled_entries: list[int] = field(default_factory=list)  # of the samples that only need the hidden state
    scores: bool = False  # whether prompt tokens are scored, which needs the hidden states of all tokens
    # On GPUs: whether decodes that share a prefix read it together, and whether all their contexts are short.
    prefix: bool = False
    short_context: bool = False
    # On GPUs: the most samples of a row that must be taken one after another, because the next depends on what its row
    # has sampled so far beyond its tokens, such as counts for penalties.
    places: int = 1

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == len(self.rows)

    @property
    def sampling_rows(self) -> Ints:
        """The row of each sampled token."""
        return self.sample_rows[: len(self.sampling_entries)]

    @property
    def predicts(self) -> bool:
        """Whether the model's predictor reads the step's tokens."""
        return bool(self.batch.wanted_drafts)

    @property
    def sample_drafts(self) -> Ints | None:
        """The draft that each sample follows, -1 where there is none; None: decodes are not split."""
        return None if self.draft_ids is None else self.draft_ids[self.sample_tokens]

    @property
    def first_samples(self) -> list[int]:
        """The samples that follow no draft, one for each entry that samples."""
        entries = self.sampling_entries
        if not self.batch.drafts:
            return list(range(len(entries)))
        return [index for index, entry in enumerate(entries) if not index or entries[index - 1] != entry]

    def pool(self, entries: list[int]) -> None:
        """Add samples for these entries, which sample no token: only the hidden state of their last one is needed."""
        self.pooled_entries = entries
        added = np.array(entries, dtype=np.int32)
        self.sample_tokens = np.concatenate((self.sample_tokens, self.query_starts[added + 1] - 1))
        self.sample_rows = np.concatenate((self.sample_rows, np.full_like(added, -1)))
        self.sample_lengths = np.concatenate((self.sample_lengths, self.context_lens[added]))


def host_step(batch: Batch, tables: Ints, block_size: int, split_decodes: bool = False) -> HostStep:
    """Convert a batch to arrays.

    `tables` [num_tables, max_rows, max_blocks] are the block tables, including this step's blocks. `split_decodes`: let
    each token of a decode be an entry.
    """
    rows, starts, counts = np.array((batch.rows, batch.starts, batch.counts), dtype=np.int32)
    num_decodes, entries, draft_ids = batch.num_decodes, None, None
    if split_decodes and batch.drafts:
        entries, rows, starts, counts, draft_ids = _split(batch, rows, starts, counts)
        num_decodes += batch.num_drafts
    lengths = starts + counts
    ends = np.cumsum(counts, dtype=np.int32)
    if batch.num_tokens == len(rows):
        token_rows, positions = rows, starts
    else:
        token_rows = np.repeat(rows, counts)
        offsets = np.arange(batch.num_tokens, dtype=np.int32) - np.repeat(ends - counts, counts)
        positions = np.repeat(starts, counts) + offsets
    slot_mapping = tables[:, token_rows, positions // block_size] * block_size + positions % block_size
    sample_tokens, sample_rows, sample_lengths = ends - 1, rows, lengths
    if entries is not None:
        (taken,) = np.array(batch.samples)[entries].nonzero()
        sample_tokens, sample_rows, sample_lengths = (
            column[taken] for column in (sample_tokens, sample_rows, sample_lengths)
        )
        sampling = entries[taken].tolist()
    elif batch.drafts:
        sampling, behind = _samples_of_drafts(batch)
        sample_rows = rows[sampling]
        sample_tokens, sample_lengths = sample_tokens[sampling] - behind, lengths[sampling] - behind
    elif all(batch.samples):
        sampling = list(range(len(rows)))
    else:
        sampling = [entry for entry, samples in enumerate(batch.samples) if samples]
        sample_tokens, sample_rows, sample_lengths = (
            sample_tokens[sampling],
            rows[sampling],
            lengths[sampling],
        )
    query_starts = np.empty(len(rows) + 1, dtype=np.int32)
    query_starts[0] = 0
    query_starts[1:] = ends
    return HostStep(
        batch=batch,
        num_decodes=num_decodes,
        num_tokens=batch.num_tokens,
        rows=rows,
        context_lens=lengths,
        query_starts=query_starts,
        token_rows=token_rows,
        positions=positions,
        slot_mapping=slot_mapping,
        sampling_entries=sampling,
        sample_tokens=sample_tokens,
        sample_rows=sample_rows,
        sample_lengths=sample_lengths,
        draft_ids=draft_ids,
    )


def _split(batch: Batch, rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Let each token of a decode be an entry.

    Return the entry in the batch, the row, the start and the count of each, and the drafts by token.
    """
    parts = counts.copy()
    parts[batch.num_decodes :] = 1
    entries = np.arange(len(rows), dtype=np.int32).repeat(parts)
    ends = parts.cumsum(dtype=np.int32)
    offsets = np.arange(len(entries), dtype=np.int32) - (ends - parts)[entries]
    draft_ids = np.full(batch.num_tokens, -1, dtype=np.int32)
    in_order = (token_id for entry in sorted(batch.drafts) for token_id in batch.drafts[entry])
    draft_ids[: len(offsets)][offsets > 0] = np.fromiter(in_order, dtype=np.int32, count=batch.num_drafts)
    whole = entries >= batch.num_decodes
    return entries, rows[entries], starts[entries] + offsets, np.where(whole, counts[entries], 1), draft_ids


def _samples_of_drafts(batch: Batch) -> tuple[list[int], Ints]:
    """Return the entry of each sample, and how many tokens of the entry come after the one that it follows."""
    counts = np.array(batch.samples, dtype=np.int32)
    for entry, draft in batch.drafts.items():
        counts[entry] += len(draft)
    entries = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts, dtype=np.int32)
    places: Ints = np.arange(1, len(entries) + 1, dtype=np.int32)
    return entries.tolist(), np.subtract(ends[entries], places, dtype=np.int32)


# ---- results ----

# Prompt positions whose logits are held at once for prompt logprobs.
PROMPT_LOGITS_AT_ONCE = 64

NOT_FINITE = RequestFailure("logits_not_finite", "the model's logits are not finite")
VECTOR_NOT_FINITE = RequestFailure("logits_not_finite", "the output of the model's head is not finite")
NO_TOKEN = RequestFailure("no_token_allowed", "the sampling parameters allow no token")


def failure(bad: int) -> RequestFailure:
    """Return why sampling an entry failed."""
    return NOT_FINITE if bad == IS_NOT_FINITE else NO_TOKEN


class StepResult(Protocol):
    """Results of one kind that a launched step will have."""

    def read_into(self, result: Sampled) -> None:
        """Add them to a result. The device is done with the step."""


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
    """The rows whose requests want logprobs of their prompts.

    Runners call `read_logits` with the logits [P, vocab_size] of all pieces, in order, before anything changes them. In
    the runner's process it may be replaced, by what needs whole distributions.
    """

    def __init__(self) -> None:
        self.read_logits: Callable[[Tensor], object] = lambda logits: None  # noqa: ARG005
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
            for offset in range(0, num_targets, most):
                size = min(most, num_targets - offset)
                yield PromptPiece(entry, row, first + offset, start + offset + 1, size, num_logprobs)
            first += count


class PooledRows:
    """The rows whose requests end with a vector from the model's head."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # row: number of prompt tokens

    def admit(self, admissions: Sequence[Admission]) -> None:
        for row, request in admissions:
            if request.task == "pool":
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
