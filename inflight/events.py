"""The schema of what happens in the engine, shared by all its readers.

A `Delta` reports the results of a step to the owner of a request, and a `RequestRecord` is its history. Steps are on
the timeline (`inflight.timeline`). All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """One candidate token at one position. The most likely token has rank 1."""

    token_id: int
    logprob: float
    rank: int


# The candidates at one position as little-endian 32-bit numbers: all token ids, then all log-probabilities, then all
# ranks. The token itself comes first; the most likely ones follow in order and may include it again. They stay a bytes
# object from the device to the reader, because a step has thousands of candidates and most are never looked at.
PositionLogprobs = bytes


@cache
def _layout(num_candidates: int) -> Struct:
    return Struct(f"<{num_candidates}i{num_candidates}f{num_candidates}i")


def pack_logprobs(candidates: Sequence[TokenLogprob]) -> PositionLogprobs:
    """Pack the candidates at one position, the token itself first."""
    ids, logprobs, ranks = zip(*candidates, strict=True)
    return _layout(len(candidates)).pack(*ids, *logprobs, *ranks)


def logprob_columns(position: PositionLogprobs) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    """Return the token ids, log-probabilities and ranks at a position, as they are packed."""
    num = len(position) // 12
    values = _layout(num).unpack(position)
    return values[:num], values[num : 2 * num], values[2 * num :]


def unpack_logprobs(position: PositionLogprobs) -> list[TokenLogprob]:
    """Return the candidates at a position: the token itself first, every id once."""
    sampled, *others = map(TokenLogprob, *logprob_columns(position))
    return [sampled, *(candidate for candidate in others if candidate.token_id != sampled.token_id)]


def own_logprob(position: PositionLogprobs) -> float:
    """Return the log-probability of the token itself."""
    value: float = _OWN.unpack_from(position, len(position) // 3)[0]
    return value


_OWN = Struct("<f")


class RequestFailure(NamedTuple):
    """Why a request ended with an error while others continued.

    Codes: `step_failed` (the request made a step raise), `logits_not_finite` (the model returned NaN or infinity),
    `no_token_allowed` (the request's own parameters exclude every token).
    """

    code: str
    message: str


@dataclass(slots=True)
class Delta:
    """An update of one request: the tokens since the last delta and, at the end, why it ended."""

    request_id: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None  # one per token in token_ids
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # whole prompt, sent once
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_token_id: int | None = None  # the token id that ended it, if one did
    error: str | None = None  # the message, if finish_reason is "error"
    error_code: str | None = None  # a code of RequestFailure, for programs
    record: RequestRecord | None = None  # set on the last delta
    vector: bytes | None = None  # the output of the model's head: raw float32


class Preemption(NamedTuple):
    """A running request went back to the queue.

    The reason is "memory" (there was too little), "policy" (its choice) or "failure" (a step failed).
    """

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class KVUsage:
    """The state of KV memory at one moment: free + cached + used == total blocks."""

    num_blocks: int
    num_empty: int
    num_cached: int  # unreferenced, but available to prefix hits
    num_used: int  # referenced by a running request
    block_size: int
    num_tokens: int  # tokens in used blocks, counting shared blocks once
    # Used blocks of each KV group, and blocks that hold snapshots; empty if the model has one group and no such state.
    groups: dict[str, int] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        """The share of the capacity of used blocks that holds no token."""
        capacity = self.num_used * self.block_size
        return 1 - self.num_tokens / capacity if capacity else 0.0


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """The tokens that each expert of each layer received between two readings."""

    tokens: tuple[tuple[int, ...], ...]  # by layer with experts, then by expert

    @property
    def imbalances(self) -> tuple[float, ...]:
        """The tokens of the busiest expert divided by the average, for each layer: at best 1, at worst the number of
        experts."""
        return tuple(max(layer) * len(layer) / max(1, sum(layer)) for layer in self.tokens)


CACHE_HASH_LENGTH = 8  # bytes of a block's hash that are sent: enough to choose an engine by


class CacheUpdate(NamedTuple):
    """Changes of an engine's prefix cache. Blocks are given as truncated hashes, concatenated."""

    cleared: bool  # everything was forgotten before the changes below
    stored: bytes
    evicted: bytes


# Why a request was not admitted: the current step had been formed before ("step"), or there was too little KV memory
# ("memory"), no free row ("slots"), no token left in the step ("budget"), or the policy chose not to ("policy").
QUEUE_CAUSES = ("step", "memory", "slots", "budget", "policy")


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Where a request's time went, in seconds. The parts add up to its latency in the engine."""

    queue: dict[str, float] = field(default_factory=dict.fromkeys(QUEUE_CAUSES, 0.0).copy)  # by cause
    prefill: float = 0.0  # computing its own tokens, also again after a preemption
    prefill_of_others: float = 0.0  # time that prompts of others added to the steps of its decodes
    decode: float = 0.0
    preempted: float = 0.0  # waiting after a preemption
    held: float = 0.0  # finished, but kept by the policy
    lost: float = 0.0  # on engines that died, until another one took over

    @property
    def total(self) -> float:
        running = self.prefill + self.prefill_of_others + self.decode
        return sum(self.queue.values()) + running + self.preempted + self.held + self.lost


@dataclass(slots=True)
class RequestRecord:
    """The history of one request."""

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
    engine_id: str = ""  # the replica that it is on, or was on last
    num_failovers: int = 0  # replicas that died while it ran
    number: int = -1  # on the timeline of that replica; -1: none is recorded
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # among the drafted ones
    # Those drafted from the client's prediction, if there is one and the engine looks it up.
    num_accepted_prediction_tokens: int | None = None
    num_rejected_prediction_tokens: int = 0
