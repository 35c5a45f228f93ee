"""What one step computes, as a runner is told: token ids and block ids, no tensors and no live objects.

All of it is plain data: it can be sent to another process, or recorded and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inflight.events import KVUsage, PositionLogprobs, Preemption, RequestFailure
from inflight.request import Request, RequestSpec
from inflight.scheduling.token_counts import TokenCounts


class Admission(NamedTuple):
    """A request takes a row. The runner uploads all its known tokens and its parameters, and keeps them for the row
    until another request takes it."""

    row: int
    request: RequestSpec


class TableUpdate(NamedTuple):
    """`block_ids` continue the block table of `row` from index `first`."""

    row: int
    first: int
    block_ids: list[int]


@dataclass(slots=True)
class Batch:
    """One step. Entry i computes tokens [starts[i], starts[i] + counts[i]) of the request in rows[i].

    A token the host does not know yet (sampled by a step still in flight) is known to the row:
    runners write every sampled token into the row that it belongs to. The entries of requests that are admitted
    in this step come last: they may share blocks that it fills.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)  # entry i ends at the row's last token: another follows
    num_tokens: int = 0
    admissions: list[Admission] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Sampled:
    """What a step produced, in the order of the batch's entries.

    `token_ids[i]` are the tokens that follow entry i: none where it does not sample, else one or, from a runner that
    can, several. Several come only while no later step of the same request is in flight; what follows a stop among
    them is dropped. Logprobs are there for the entries that asked, one per token.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    # Of several tokens of an entry, how many of the first have their KV written by this step: none unless stated.
    num_written: dict[int, int] = field(default_factory=dict)
    # For tokens starts[i] + 1 ... of entry i's prompt, as far as this chunk predicts them.
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    # What the model's head returns for the entries of kind "pool" that end here, float32 as they lie in memory.
    vectors: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, RequestFailure] = field(default_factory=dict)  # entries whose request failed, alone


@dataclass(slots=True)
class ScheduledStep:
    batch: Batch
    requests: list[Request] = field(default_factory=list)  # of the batch's entries
    completed: list[int] = field(
        default_factory=list
    )  # entries whose request has all it needs, and samples nothing
    # Since the last step that was launched: a schedule that only preempts computes nothing.
    preempted: list[Preemption] = field(default_factory=list)
    kv: KVUsage = field(init=False)  # memory as the step finds it, once all is scheduled

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def samples(self) -> list[bool]:
        return self.batch.samples

    def __len__(self) -> int:
        return len(self.requests)

    def put(self, request: Request, count: int, counts: TokenCounts) -> None:
        """Enter the next `count` tokens of the request into the batch."""
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

    def move_to_end(self, first: int, count: int) -> None:
        """Put the `count` entries from `first` on behind all others."""
        batch, num_entries, end = self.batch, len(self.requests), first + count
        if not count or end == num_entries:
            return
        columns: tuple[list[Any], ...] = (
            self.requests,
            batch.rows,
            batch.starts,
            batch.counts,
            batch.samples,
        )
        for column in columns:
            column[first:] = column[end:] + column[first:end]
        places = [*range(first), *range(num_entries - count, num_entries), *range(first, num_entries - count)]
        self.completed = [places[entry] for entry in self.completed]

    def withdraw(self, request: Request, counts: TokenCounts) -> None:
        """Take the request out of the step being formed, if it is part of it."""
        if request not in self.requests:
            return
        batch, index = self.batch, self.requests.index(request)
        del self.requests[index], batch.rows[index], batch.starts[index]
        batch.num_tokens -= batch.counts.pop(index)
        samples, completes = batch.samples.pop(index), index in self.completed
        counts.withdraw(request, samples or completes, samples)
        self.completed = [entry - (entry > index) for entry in self.completed if entry != index]
