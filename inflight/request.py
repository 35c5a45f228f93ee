"""A request: its immutable specification (`RequestSpec`) and its state in the engine (`Request`)."""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from inflight.errors import ParameterError, RequestError
from inflight.events import PositionLogprobs, RequestRecord
from inflight.sampling_params import SamplingParams

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # cannot be subscripted at run time, when msgspec reads the annotations

PRIORITY_RANGE = (-(2**31), 2**31 - 1)
MAX_TENANT_LENGTH = MAX_SALT_LENGTH = 256
# Prompt tokens of one step with logprobs: each needs the logits of the whole vocabulary, and other requests wait.
MAX_SCORED_CHUNK = 256


class Status(enum.Enum):
    """The state of a request. WAITING and RUNNING may alternate; LINGERING is finished, but kept by the policy."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LINGERING = enum.auto()
    FINISHED = enum.auto()


class Phase(enum.Enum):
    """The phase that a request spends its time in (`Attribution` in `scheduling/request_pool.py`)."""

    NEW = enum.auto()
    QUEUED = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    PREEMPTED = enum.auto()
    HELD = enum.auto()  # finished, but kept by the policy
    OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Where a request comes from, for timelines: the client's request that it is an answer to."""

    request_id: str  # as the client sees it
    answer: int = 0  # index among the answers or texts of that request
    key: str = ""  # the name of the API key
    route: str = ""
    text: str = ""  # of the prompt, shortened; only if the server may show texts


class ContextOptions(TypedDict, total=False):
    """The fields of `RequestContext`, as keyword arguments."""

    priority: int
    tenant: str
    cache_salt: str


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The settings besides parameters that all requests of a call share: scheduling, and who shares their cache.

    Every layer from the API down to `RequestSpec` passes it on unchanged, so a field added here reaches all of them.
    Raises ParameterError for values that would break the queue or the wire for other requests.
    """

    priority: int = 0  # smaller values go first
    tenant: str = ""
    cache_salt: str = ""  # requests with different salts share no blocks

    def __post_init__(self) -> None:
        priority, (low, high) = self.priority, PRIORITY_RANGE
        if isinstance(priority, bool) or not isinstance(priority, int) or not low <= priority <= high:
            raise ParameterError.of_value("priority", priority, f"it must be an integer from {low} to {high}")
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_LENGTH:
            raise ParameterError.of_value(
                "tenant", self.tenant, f"it must be a string of at most {MAX_TENANT_LENGTH} characters"
            )
        salt = self.cache_salt
        if not isinstance(salt, str) or len(salt) > MAX_SALT_LENGTH or not _is_unicode(salt):
            raise ParameterError.of_value(
                "cache_salt", salt, f"it must be valid Unicode of at most {MAX_SALT_LENGTH} characters"
            )

    @classmethod
    def pop(cls, options: dict[str, Any]) -> RequestContext:
        """Take the fields of a context out of a call's keyword arguments."""
        return cls(**{item.name: options.pop(item.name) for item in fields(cls) if item.name in options})


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


DEFAULT_CONTEXT = RequestContext()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The immutable part of a request, from the moment that it is validated.

    The same object is sent to an engine process, passed to a runner when the request gets a row, and copied when the
    request is resumed on another engine. A field added here therefore reaches all of them.
    """

    request_id: str
    token_ids: TokenIds  # the prompt, then any outputs that it already has
    params: SamplingParams
    max_tokens: int  # outputs, already limited to the context length
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # tokens that end it after min_tokens outputs
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    context: RequestContext = DEFAULT_CONTEXT
    num_prompt_tokens: int = 0  # 0: all of token_ids; fewer if the request already has outputs
    # With max_tokens 0: "prompt_logprobs" returns the logprobs of the prompt, "pool" the vector of the model's head.
    task: str = "generate"
    splittable: bool = True  # False: all tokens are computed in one step, as bidirectional attention needs
    second_segment: int = 0  # start of the second text of a pair, for models with segment ids; 0: one text
    origin: RequestOrigin | None = None
    prediction_ids: TokenIds | None = None  # what the outputs may be like

    def __post_init__(self) -> None:
        if not self.num_prompt_tokens:
            object.__setattr__(self, "num_prompt_tokens", len(self.token_ids))

    @property
    def cache_key(self) -> str:
        """The key that names the request's blocks together with the ids: requests with different keys share none."""
        return self.context.cache_salt

    @property
    def name_ids(self) -> TokenIds:
        """The ids that name the request's blocks, one for each token."""
        return self.token_ids

    def resumed(self, output_ids: Sequence[int]) -> RequestSpec:
        """Return the rest of this request, which produced these outputs before its engine was lost.

        Any engine with the same model continues with the token that would have come next. Raises RequestError if the
        request had ended.
        """
        num_outputs = len(output_ids)
        is_stopped = num_outputs > self.params.min_tokens and output_ids[-1] in self.stop_ids
        if num_outputs >= self.max_tokens > 0 or is_stopped:
            raise RequestError(
                f"request {self.request_id!r} already has all its {num_outputs} output tokens",
                param="output_ids",
            )
        params = self.params
        if num_outputs and params.prompt_logprobs is not None:  # they came with the first output
            params = replace(params, prompt_logprobs=None)
        prompt_ids = self.token_ids[: self.num_prompt_tokens]
        return replace(self, params=params, token_ids=prompt_ids + array("q", output_ids))


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine: its `spec` and the state of its computation.

             num_cached    num_computed        len(token_ids)   num_tokens
    |-----------|---------------|--------------------|---------------|
     prefix hit   have KV, or an   known, to compute    in flight: sampled by a step
                  enqueued step                         that is not collected yet
                  computes them
    """

    spec: RequestSpec
    token_ids: list[int] = field(init=False)  # the prompt, then every token produced

    # Copies of the spec's fields that every step reads.
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    task: str = field(init=False)

    # Scheduler state.
    max_chunk: int = sys.maxsize  # the most tokens that one step may compute
    arrival: int = -1  # order of arrival, fixed
    status: Status = Status.WAITING
    row: int = -1
    num_computed: int = 0
    num_in_flight: int = 0
    num_drafted: int = 0  # drafts behind num_computed, which a step in flight verifies
    num_cached: int = 0
    num_tokens: int = 0
    max_total: int = 0  # num_tokens never exceeds it
    num_to_compute: int = 0  # tokens that need KV: all but the last output

    # Latency attribution.
    phase: Phase = Phase.NEW
    phase_at: float = 0.0  # when it began
    phase_clocks: tuple[float, ...] = ()  # readings of the engine-wide clocks at that time

    # Policy state: position in the queue, times it was passed, and prompt tokens charged to its tenant.
    order: float = 0.0
    num_passed: int = 0
    num_charged: int = 0

    # Block manager state.
    # The bundles of each KV group; empty: it holds no memory.
    tables: list[list[int]] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)  # of each group: bundles before it are released
    kv_capacity: int = 0  # tokens that fit into its tables
    branch: int = 0  # blocks after which its tokens differ from the cached ones, if that matters
    num_continued: int = 0  # blocks after which no other request is likely to continue before this one ends
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    hash_state: Any = field(default=None, repr=False)  # SHA-256 state after all of block_hashes, or None
    num_published: int = 0  # leading blocks that are in the prefix cache

    draft_record: Any = None  # what scheduling/drafts.py keeps of it

    record: RequestRecord = field(init=False)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)  # as far as computed

    def __post_init__(self) -> None:
        spec = self.spec
        self.request_id, self.params, self.task = spec.request_id, spec.params, spec.task
        self.num_prompt_tokens, self.max_tokens = spec.num_prompt_tokens, spec.max_tokens
        self.stop_ids = spec.stop_ids
        self.token_ids = spec.token_ids.tolist()
        self.num_tokens = len(self.token_ids)
        if self.params.prompt_logprobs is not None:
            self.max_chunk = min(self.max_chunk, MAX_SCORED_CHUNK)
        self.max_total = self.num_prompt_tokens + self.max_tokens
        self.num_to_compute = self.max_total - 1 if self.max_tokens else self.max_total
        self.record = RequestRecord(self.request_id, self.tenant, self.priority, self.num_prompt_tokens)

    @classmethod
    def create(
        cls, request_id: str, token_ids: Sequence[int], params: SamplingParams, max_tokens: int, **fields: Any
    ) -> Request:
        """Create a request together with its spec; `fields` are further fields of the spec or its context."""
        context = RequestContext.pop(fields)
        return cls(
            RequestSpec(request_id, array("q", token_ids), params, max_tokens, context=context, **fields)
        )

    @property
    def tenant(self) -> str:
        return self.spec.context.tenant

    @property
    def priority(self) -> int:
        return self.spec.context.priority

    @property
    def splittable(self) -> bool:
        return self.spec.splittable

    def name_ids(self, start: int, stop: int) -> memoryview:
        """Return the ids that name tokens [start, stop) in prefix caches, as bytes."""
        ids = self.spec.name_ids
        if stop <= len(ids):
            return memoryview(ids)[start:stop].cast("B")
        return memoryview(ids[start:] + array("q", self.token_ids[max(start, len(ids)) : stop])).cast("B")

    def resumed(self, output_ids: Sequence[int]) -> Request:
        """Return a new request for the rest of this one: see `RequestSpec.resumed`."""
        return Request(self.spec.resumed(output_ids))

    def current_spec(self) -> RequestSpec:
        """Return the spec with all tokens that are known by now."""
        new_ids = self.token_ids[len(self.spec.token_ids) :]
        if not new_ids:
            return self.spec
        return replace(self.spec, token_ids=self.spec.token_ids + array("q", new_ids))

    @property
    def num_output_tokens(self) -> int:
        """The number of outputs known to the host."""
        return len(self.token_ids) - self.num_prompt_tokens
