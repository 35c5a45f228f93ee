"""What one step computes, as the scheduler tells it to a runner: token ids and block ids, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from inflight.events import KVUsage, PositionLogprobs, RequestFailure
from inflight.request import Request


class Admission(NamedTuple):
    """A request takes a row. The runner uploads all its known tokens and its parameters."""

    row: int
    request: Request


class TableUpdate(NamedTuple):
    """`block_ids` continue the block table of `row` from index `first`."""

    row: int
    first: int
    block_ids: list[int]


@dataclass(slots=True)
class Batch:
    """One step. Entry i computes tokens [starts[i], starts[i] + counts[i]) of requests[i] in rows[i].

    A token the host does not know yet (sampled by a step still in flight) is known to the row:
    runners write every sampled token into the row that it belongs to.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)  # entry i ends at its request's last token
    num_tokens: int = 0
    admissions: list[Admission] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    kv: KVUsage = field(init=False)  # memory as the step finds it, once all is scheduled

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(slots=True)
class Sampled:
    """What a step produced, in the order of the batch's entries.

    `token_ids[i]` is -1 where entry i does not sample. Logprobs are there for the entries that asked.
    """

    token_ids: list[int]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    # For tokens starts[i] + 1 ... of entry i's prompt, as far as this chunk predicts them.
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    errors: dict[int, RequestFailure] = field(default_factory=dict)  # entries whose request failed, alone
