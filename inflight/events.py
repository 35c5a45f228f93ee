"""What happened, in the one schema that every reader shares.

`Delta` is what one step tells the owner of a request. `StepRecord` and `RequestRecord` are what
timelines, metrics, benchmarks and the simulator read. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """One candidate at one position. `rank` counts from 1, the most likely token."""

    token_id: int
    logprob: float
    rank: int


# The candidates at one position as 32-bit numbers, little-endian: all token ids, then all log-probabilities, then all
# ranks. The token itself is the first; the most likely ones follow in order, and it may be among them once more. One
# bytes object from the device to whoever reads them: a step has thousands of candidates, and most are never looked at.
PositionLogprobs = bytes


@cache
def _layout(num_candidates: int) -> Struct:
    return Struct(f"<{num_candidates}i{num_candidates}f{num_candidates}i")


def pack_logprobs(candidates: Sequence[TokenLogprob]) -> PositionLogprobs:
    """Pack the candidates at one position, the token itself first."""
    ids, logprobs, ranks = zip(*candidates, strict=True)
    return _layout(len(candidates)).pack(*ids, *logprobs, *ranks)


def logprob_columns(
    position: PositionLogprobs,
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    """Return the token ids, log-probabilities and ranks at a position, as they are packed."""
    num = len(position) // 12
    values = _layout(num).unpack(position)
    return values[:num], values[num : 2 * num], values[2 * num :]


def unpack_logprobs(position: PositionLogprobs) -> list[TokenLogprob]:
    """Return the candidates at a position: the token itself first, every id once."""
    own, *others = map(TokenLogprob, *logprob_columns(position))
    return [own, *(candidate for candidate in others if candidate.token_id != own.token_id)]


def own_logprob(position: PositionLogprobs) -> float:
    """Return the log-probability of the token itself."""
    value: float = _OWN.unpack_from(position, len(position) // 3)[0]
    return value


_OWN = Struct("<f")


class RequestFailure(NamedTuple):
    """Why a request ended with an error while others went on.

    Codes: `step_failed` (a step raised, and the request was to blame), `logits_not_finite` (so was the model),
    `no_token_allowed` (the request's own parameters leave none).
    """

    code: str
    message: str


@dataclass(slots=True)
class Delta:
    """News of one request: the tokens since the last delta and, at the end, why it ended."""

    request_id: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None  # one per token in token_ids
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # whole prompt, sent once
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_token_id: int | None = None  # the token id that ended it, when one did
    error: str | None = None  # the message, when finish_reason is "error"
    error_code: str | None = None  # beside it, for programs: one of those of RequestFailure
    record: RequestRecord | None = None  # set on the last delta
    vector: bytes | None = None  # what the model's head returns: float32 as they lie in memory


class Preemption(NamedTuple):
    """A running request went back to the queue: for want of "memory", by the choice of the "policy", or for a
    "failure" of a step."""

    request_id: str
    reason: str


class ArrivalRecord(NamedTuple):
    request_id: str
    at: float


class AbortRecord(NamedTuple):
    """A request was ended from outside: by its owner, or for a stop string."""

    request_id: str
    at: float
    reason: str


class SlotRecord(NamedTuple):
    """One slot's work in one step: tokens [start, start + num_tokens) of a request."""

    row: int
    request_id: str
    start: int
    num_tokens: int
    samples: bool  # the step produced a token here
    decodes: bool  # the one token computed was itself an output


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks and token places at one moment: free + cached + in use == total."""

    num_blocks: int
    num_free: int  # hold nothing
    num_cached: int  # unreferenced, but still found by a prefix hit
    num_used: int  # referenced by a running request
    block_size: int
    num_tokens: int  # token places filled in used blocks, shared blocks counted once

    @property
    def waste(self) -> float:
        """Share of the places in used blocks that hold no token."""
        places = self.num_used * self.block_size
        return 1 - self.num_tokens / places if places else 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine, as anyone may watch it. Without slots: the last request was aborted between steps."""

    step: int
    started_at: float
    finished_at: float
    slots: tuple[SlotRecord, ...]
    admitted_ids: tuple[str, ...]
    preempted: tuple[Preemption, ...]  # since the step before
    finished_ids: tuple[str, ...]
    idle_rows: tuple[int, ...]  # rows held by finished requests that the policy keeps
    num_running: int
    num_waiting: int
    kv: KVUsage
    error: str | None = None  # the step failed, or was in flight beside one that did: nothing of it counts
    scheduled_at: float = 0.0  # when the scheduler began to form it; launched at started_at
    began_at: float = 0.0  # when the device did: it was launched, and the step before it was over
    updated_at: float = 0.0  # when its results, there at finished_at, had been taken in
    engine_id: str = ""
    arrived: tuple[ArrivalRecord, ...] = ()  # since the record before
    aborted: tuple[AbortRecord, ...] = ()  # since the record before


CACHE_NAME_LENGTH = 8  # bytes of a block's name that travel: enough to choose an engine by


class CacheUpdate(NamedTuple):
    """How an engine's prefix cache has changed. Blocks are the beginnings of their names, one behind the other."""

    cleared: bool  # before what follows, all was forgotten
    stored: bytes
    evicted: bytes


# Why nobody was admitted: the step that is computed was formed before ("step"); there was no room for more KV
# ("memory"), no free row ("slots"), no token left of the step ("budget"), or the policy wanted nobody ("policy").
QUEUE_CAUSES = ("step", "memory", "slots", "budget", "policy")


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Where a request's time went, in seconds. The parts add up to its latency in the engine."""

    queue: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUE_CAUSES, 0.0))  # by cause
    prefill: float = 0.0  # its own tokens were computed, again after a preemption
    prefill_of_others: float = 0.0  # that steps with its decodes took longer because of prompts in them
    decode: float = 0.0
    preempted: float = 0.0  # back in the queue
    held: float = 0.0  # it had all its tokens, and the policy kept it
    lost: float = 0.0  # with engines that died, and until another one had it

    @property
    def total(self) -> float:
        running = self.prefill + self.prefill_of_others + self.decode
        return sum(self.queue.values()) + running + self.preempted + self.held + self.lost


@dataclass(slots=True)
class RequestRecord:
    """One request's life."""

    request_id: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    arrived_at: float = 0.0
    admitted_at: float | None = None  # first admission
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_token_id: int | None = None
    breakdown: TimeBreakdown = field(default_factory=TimeBreakdown)
    engine_id: str = ""  # the replica that it is or was on, the last one
    num_failovers: int = 0  # replicas that it outlived
