"""What users get back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from inflight.events import PositionLogprobs, RequestRecord, logprob_columns
from inflight.scoring import Scale

if TYPE_CHECKING:  # the command line reads this file, and loads numpy later
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
PooledT = TypeVar("PooledT", bound="EmbeddingOutput | ClassificationOutput | ScoreOutput")


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# By token id: the token itself and the most likely ones, the token first.
Logprobs = dict[int, Logprob]

_SETTERS = [getattr(Logprob, name).__set__ for name in ("logprob", "rank", "decoded_token")]


class PackedLogprobs:
    """The candidates at consecutive positions as the engine sends them. Objects are made of those that are read."""

    __slots__ = ("_read", "_text_of", "positions")

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self.positions: list[PositionLogprobs | None] = []
        self._text_of = text_of
        self._read: list[Logprobs | None] = []

    def read(self) -> list[Logprobs | None]:
        """Return the candidates by token id. It is the same list each time, brought up to date."""
        read = self._read
        for position in self.positions[len(read) :]:
            read.append(None if position is None else self._unpack(position))
        return read

    def _unpack(self, position: PositionLogprobs) -> Logprobs:
        ids, logprobs, ranks = logprob_columns(position)
        # The constructor of a frozen dataclass takes several times as long.
        found = [*map(object.__new__, repeat(Logprob, len(ids)))]
        for set_value, values in zip(_SETTERS, (logprobs, ranks, map(self._text_of, ids)), strict=True):
            deque(map(set_value, found, values), 0)
        by_id = dict(zip(ids, found, strict=True))
        by_id[ids[0]] = found[0]  # the token itself, which may be among the most likely ones too
        return by_id


def _read_when_asked(name: str) -> Callable[[type[T]], type[T]]:
    """Let a field of a dataclass with slots be `PackedLogprobs`: whoever reads it gets what they hold."""

    def decorate(cls: type[T]) -> type[T]:
        slot: Any = getattr(cls, name)

        def get(self: T) -> Any:
            value = slot.__get__(self)
            return value.read() if isinstance(value, PackedLogprobs) else value

        setattr(cls, name, property(get, slot.__set__))
        return cls

    return decorate


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called."""

    id: str
    name: str
    arguments: str  # JSON text; broken off where the answer was


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """The answer to a conversation, taken apart."""

    content: str | None  # None if there are only calls
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As a message of the conversation, to go on with."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return found


class Answered(int):
    """True or False, and a function that returns it."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


@_read_when_asked("logprobs")
@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for EOS
    error: str | None = None
    message: AssistantMessage | None = None  # of chats

    # What vLLM's have and no answer here has.
    lora_request: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    routed_experts: ClassVar[None] = None

    @property
    def finished(self) -> Answered:
        """Read or called, as vLLM's is: both say the same."""
        return Answered(self.finish_reason is not None)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock; over all its answers."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    num_preemptions: int

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @classmethod
    def of(cls, records: list[RequestRecord]) -> RequestMetrics:
        """Of the records of all answers: the first start, the last end."""

        def known(name: str) -> list[float]:
            return [value for record in records if (value := getattr(record, name)) is not None]

        return cls(
            arrival_time=min(record.arrived_at for record in records),
            first_scheduled_time=min(known("admitted_at"), default=None),
            first_token_time=min(known("first_token_at"), default=None),
            last_token_time=max(known("last_token_at"), default=None),
            finished_time=max(known("finished_at"), default=None),
            num_preemptions=sum(record.num_preemptions for record in records),
        )


@_read_when_asked("prompt_logprobs")
@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers, complete or as far as they are."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0

    # What vLLM's have and no request here has.
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[dict[str, Any]] = {}
    kv_transfer_params: ClassVar[None] = None


# ---- of models that embed, classify or score ----


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """A text's embedding: `vector` as it lies in memory, `embedding` as a list."""

    vector: NDArray[np.float32]

    @property
    def embedding(self) -> list[float]:
        """Made anew each time it is asked for."""
        found: list[float] = self.vector.tolist()
        return found

    @property
    def hidden_size(self) -> int:
        return len(self.vector)


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """One number for each label, on a scale: probabilities, or with "logit" what the head gave."""

    vector: NDArray[np.float32]
    labels: tuple[str, ...]
    scale: Scale

    @property
    def probs(self) -> list[float]:
        """Made anew each time it is asked for."""
        found: list[float] = self.vector.tolist()
        return found

    @property
    def num_classes(self) -> int:
        return len(self.vector)

    @property
    def label(self) -> str:
        """Of the highest number."""
        return self.labels[int(self.vector.argmax())]


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well a document answers a query."""

    score: float
    scale: Scale


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """A text, or a pair of them, and what the model's head made of it."""

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]  # of a cosine: the query's, then the document's
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class RerankResult:
    """A document's place in a ranking is its place in the list; `index` is where it was given."""

    index: int
    relevance_score: float
    document: str
    scale: Scale


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """What `AsyncEngine.embed` returns, in the order of the texts."""

    vectors: NDArray[np.float32]  # [texts, dimensions]
    num_prompt_tokens: int  # of all texts together
    num_cached_tokens: int  # of these, found in the prefix cache


@dataclass(frozen=True, slots=True, eq=False)
class Classifications:
    """What `AsyncEngine.classify` returns, in the order of the texts."""

    vectors: NDArray[np.float32]  # [texts, labels], on the scale
    labels: tuple[str, ...]
    scale: Scale
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What `AsyncEngine.score` returns, in the order of the documents."""

    values: NDArray[np.float32]  # [documents], on the scale
    scale: Scale
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """What `AsyncEngine.rerank` returns: the best document first, of equal ones the one given first."""

    results: list[RerankResult]
    scale: Scale
    num_prompt_tokens: int
    num_cached_tokens: int
