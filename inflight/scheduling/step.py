"""One step as the scheduler knows it: the batch that a runner gets, and whose entries they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.events import KVUsage, Preemption
from inflight.request import Request
from inflight.scheduling.batch import Batch
from inflight.scheduling.token_counts import TokenCounts


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
