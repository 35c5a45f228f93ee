"""What one step computes, as a runner is told: token ids and block ids, no tensors and no live objects.

All of it is plain data: it can be sent to another process, or recorded and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from inflight.events import PositionLogprobs, RequestFailure
from inflight.request import RequestSpec


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
