"""One job inside the engine (`Request`): what was asked for, and what its parts keep of it."""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.errors import RequestError
from inflight.events import PositionLogprobs, RequestRecord
from inflight.sampling_params import SamplingParams

MAX_SALT_LENGTH = 256
# Prompt tokens that are scored in one step: each takes the logits of the whole vocabulary, and others wait for them.
MAX_SCORED_CHUNK = 256


class Status(enum.Enum):
    """Where a request is. WAITING and RUNNING may alternate; LINGERING waits for its policy to let it go."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LINGERING = enum.auto()
    FINISHED = enum.auto()


class Phase(enum.Enum):
    """What a request's time goes into (`scheduling/attribution.py`)."""

    NEW = enum.auto()
    QUEUED = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    PREEMPTED = enum.auto()
    HELD = enum.auto()  # finished, and kept by the policy
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One job inside the engine: token ids in, and out what its kind returns (`scheduling/kinds.py`).

             num_cached    num_computed        len(token_ids)   num_tokens
    |-----------|---------------|--------------------|---------------|
     prefix hit   have KV, or an   known, to compute    in flight: sampled by a step
                  enqueued step                         that is not collected yet
                  computes them
    """

    request_id: str
    token_ids: list[int]  # the prompt, then every token produced
    params: SamplingParams
    max_tokens: int  # outputs, already cut to the context length
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # ids that end it once min_tokens are there
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # smaller goes first
    tenant: str = ""
    cache_salt: str = ""
    num_prompt_tokens: int = 0  # 0: all of token_ids; less when resuming a request that has outputs
    # Or, with max_tokens 0, "score": the logprobs of the prompt's tokens, or "pool": what the model's head returns.
    kind: str = "generate"
    second_segment: int = (
        0  # where the second of a pair of texts begins, for models that tell them apart; 0: one text
    )
    max_chunk: int = sys.maxsize  # tokens that one step may compute of it
    splittable: bool = True  # else all its tokens are computed in one step, as bidirectional attention needs
    # token_ids as they came, side by side in memory: for what copies or hashes them. Empty: made from token_ids.
    first_ids: array[int] = field(default_factory=lambda: array("q"))

    # The scheduler's.
    arrival: int = -1  # order of arrival, never changed
    status: Status = Status.WAITING
    row: int = -1
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    max_total: int = 0  # num_tokens never exceeds it
    num_to_compute: int = 0  # tokens that get KV at most: the last output needs none

    # The attribution's.
    phase: Phase = Phase.NEW
    phase_at: float = 0.0  # when it began
    phase_clocks: tuple[float, ...] = ()  # where the engine's clocks stood then

    # The policy's: its place in the queue, how often others went before it, and the prompt tokens its tenant paid for.
    order: float = 0.0
    num_passed: int = 0
    num_charged: int = 0

    # The block manager's.
    block_ids: list[int] = field(default_factory=list)
    num_places: int = 0  # token places in block_ids
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    block_hasher: Any = field(
        default=None, repr=False, compare=False
    )  # which has taken in all of these, or None
    num_published: int = 0  # blocks the prefix cache knows

    record: RequestRecord = field(init=False)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)  # as far as computed

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)
        self.first_ids = self.first_ids or array("q", self.token_ids)
        self.num_tokens = len(self.token_ids)
        if self.params.prompt_logprobs is not None:
            self.max_chunk = min(self.max_chunk, MAX_SCORED_CHUNK)
        self.max_total = self.num_prompt_tokens + self.max_tokens
        self.num_to_compute = self.max_total - 1 if self.max_tokens else self.max_total
        self.record = RequestRecord(self.request_id, self.tenant, self.priority, self.num_prompt_tokens)

    def resumed(self, output_ids: Sequence[int]) -> Request:
        """A request for the rest of this one, which gave these outputs and then lost its engine: any engine with the
        same model goes on with the token that would have come next. Raises RequestError if it had ended."""
        num_outputs = len(output_ids)
        is_stopped = num_outputs > self.params.min_tokens and output_ids[-1] in self.stop_ids
        if num_outputs >= self.max_tokens > 0 or is_stopped:
            raise RequestError(
                f"request {self.request_id!r} has all its {num_outputs} tokens: nothing is left",
                param="output_ids",
            )
        params = self.params
        if num_outputs and params.prompt_logprobs is not None:  # told with the first output
            params = replace(params, prompt_logprobs=None)
        return Request(
            request_id=self.request_id,
            token_ids=[*self.token_ids[: self.num_prompt_tokens], *output_ids],
            params=params,
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop_ids=self.stop_ids,
            bad_word_ids=self.bad_word_ids,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            num_prompt_tokens=self.num_prompt_tokens,
            kind=self.kind,
            splittable=self.splittable,
            second_segment=self.second_segment,
        )

    def known_ids(self) -> array[int]:
        """token_ids, side by side in memory."""
        rest = self.token_ids[len(self.first_ids) :]
        return self.first_ids + array("q", rest) if rest else self.first_ids

    @property
    def num_output_tokens(self) -> int:
        """Outputs known to the host."""
        return len(self.token_ids) - self.num_prompt_tokens
