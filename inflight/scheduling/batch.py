"""One step: the batch that a runner computes, its results, and the scheduler's view of both.

`Batch` and `Sampled` are plain data (token ids and block ids, no tensors and no live objects), so they can be sent to
another process, or recorded and replayed. `ScheduledStep` adds the requests that the batch's entries belong to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from inflight.events import KVUsage, PositionLogprobs, Preemption, RequestFailure
from inflight.kv.block_manager import TableUpdate
from inflight.kv.snapshots import StateCopies, StateCopy
from inflight.request import Request, RequestSpec

if TYPE_CHECKING:
    from inflight.scheduling.request_pool import TokenCounts


class Admission(NamedTuple):
    """A request that gets a row.

    The runner uploads its known tokens and parameters, and keeps them until another request gets the row.
    """

    row: int
    request: RequestSpec


class Capture(NamedTuple):
    """The state that a row has after `position` tokens, which entry `entry` computes, goes into a snapshot."""

    entry: int
    position: int
    block_ids: list[int]


@dataclass(slots=True)
class Batch:
    """One step. Entry i computes tokens [starts[i], starts[i] + counts[i]) of the request in rows[i].

    A token that the host does not know yet (a step in flight samples it) is known to the row: runners write every
    sampled token into its row. The entries of requests admitted in this step come last, because they may share blocks
    that the step fills.

    A decode may have drafts: guesses of the tokens that follow its own. It then computes them, too, and samples after
    its own token and after each draft that was sampled before it. So drafts change no token, only how many a step
    samples.

    Recurrent states are copied before anything else: first from snapshots to rows, then from rows to new
    snapshots.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    # Whether entry i ends at the row's last token, so that the next one is sampled.
    samples: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    # The first entries decode: each computes the one token that its row is behind, and its drafts.
    num_decodes: int = 0
    drafts: dict[int, list[int]] = field(
        default_factory=dict
    )  # token ids by entry: the last counts[entry] - 1
    # By entry, how many tokens behind the sampled ones the model's predictor guesses; empty: it does not run.
    wanted_drafts: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    restores: list[StateCopy] = field(default_factory=list)  # snapshot to row
    saves: list[StateCopy] = field(default_factory=list)  # row to snapshot
    captures: list[Capture] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of prompts, or of what preempted requests compute again."""
        return self.num_tokens - self.num_decodes - self.num_drafts

    @property
    def num_drafts(self) -> int:
        """The drafted tokens of all entries."""
        return sum(map(len, self.drafts.values())) if self.drafts else 0


@dataclass(slots=True)
class Sampled:
    """The results of a step, in the order of the batch's entries.

    `token_ids[i]` are the tokens that follow entry i: none if it does not sample, otherwise one, after those of its
    drafts that were sampled. Logprobs are present for the entries that requested them, one per token.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    # For the prompt tokens starts[i] + 1 ... that the chunk of entry i predicts.
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    # The output of the model's head for the entries of kind "pool" that end here: raw float32.
    vectors: dict[int, bytes] = field(default_factory=dict)
    # Entries whose request failed on its own: no token follows, or the last of its tokens means nothing.
    errors: dict[int, RequestFailure] = field(default_factory=dict)
    # Guesses of the tokens behind `token_ids[i]`, at most as many as the batch wants.
    drafts: dict[int, list[int]] = field(default_factory=dict)

    def num_refused(self, batch: Batch) -> dict[int, int]:
        """Return how many drafts of each entry were refused, for those that had some."""
        return {entry: len(draft) - len(self.token_ids[entry]) + 1 for entry, draft in batch.drafts.items()}


@dataclass(slots=True)
class ScheduledStep:
    """A batch, and the requests that its entries belong to."""

    batch: Batch
    requests: list[Request] = field(default_factory=list)  # by entry
    completed: list[int] = field(default_factory=list)  # entries that finish their request and sample nothing
    # All since the last step that was launched: a schedule that only preempts launches none.
    preempted: list[Preemption] = field(default_factory=list)
    kv: KVUsage = field(init=False)  # set once everything is scheduled

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def samples(self) -> list[bool]:
        return self.batch.samples

    def __len__(self) -> int:
        return len(self.requests)

    def put(self, request: Request, count: int, counts: TokenCounts) -> None:
        """Add the next `count` tokens of the request to the batch."""
        batch = self.batch
        self.requests.append(request)
        batch.rows.append(request.row)
        batch.starts.append(request.num_computed)
        batch.counts.append(count)
        batch.num_tokens += count
        catches_up, samples = counts.schedule(request, count)
        batch.samples.append(samples)
        if catches_up and not samples:
            self.completed.append(len(self.requests) - 1)

    def draft(self, entry: int, token_ids: list[int], counts: TokenCounts) -> None:
        """Let a decode verify these tokens, too. The request has blocks for them."""
        batch = self.batch
        batch.drafts[entry] = token_ids
        batch.counts[entry] += len(token_ids)
        batch.num_tokens += len(token_ids)
        counts.draft(self.requests[entry], len(token_ids))

    def move_to_end(self, first: int, count: int) -> None:
        """Move the `count` entries that begin at `first` behind all others."""
        batch, num_entries, end = self.batch, len(self.requests), first + count
        if not count or end == num_entries:
            return
        columns: list[list[Any]] = [batch.rows, batch.starts, batch.counts, batch.samples]
        for column in (self.requests, *columns):
            column[first:] = column[end:] + column[first:end]
        positions = [
            *range(first),
            *range(num_entries - count, num_entries),
            *range(first, num_entries - count),
        ]
        self.completed = [positions[entry] for entry in self.completed]

    def set_copies(self, copies: StateCopies | None) -> None:
        """Add the copies of recurrent states; None: the model has none."""
        if copies is None:
            return
        batch = self.batch
        batch.restores, batch.saves = copies.restores, copies.saves
        batch.captures = [
            Capture(self.requests.index(copy.request), copy.position, copy.block_ids)
            for copy in copies.captures
        ]

    def withdraw(self, request: Request, counts: TokenCounts) -> None:
        """Remove the request from the step being formed, if it is part of it."""
        if request not in self.requests:
            return
        batch, index = self.batch, self.requests.index(request)
        del self.requests[index], batch.rows[index], batch.starts[index]
        batch.num_tokens -= batch.counts.pop(index)
        batch.num_decodes -= index < batch.num_decodes
        samples, completes = batch.samples.pop(index), index in self.completed
        counts.withdraw(request, samples or completes, samples)
        self.completed = [entry - (entry > index) for entry in self.completed if entry != index]
