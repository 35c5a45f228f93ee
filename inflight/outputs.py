"""The objects that `LLM` and `AsyncEngine` return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from inflight.events import PositionLogprobs, logprob_columns
from inflight.scoring import Scale
from inflight.vllm_names import vllm_attribute

if TYPE_CHECKING:  # the command line imports this module without numpy
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
    """The candidates at consecutive positions as the engine sends them. They become objects when they are read."""

    __slots__ = ("_read", "_text_of", "positions")

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self.positions: list[PositionLogprobs | None] = []
        self._text_of = text_of
        self._read: list[Logprobs | None] = []

    def read(self) -> list[Logprobs | None]:
        """Return the candidates by token id: always the same list, brought up to date."""
        read = self._read
        for position in self.positions[len(read) :]:
            read.append(None if position is None else self._unpack(position))
        return read

    def _unpack(self, position: PositionLogprobs) -> Logprobs:
        ids, logprobs, ranks = logprob_columns(position)
        # The constructor of a frozen dataclass takes several times as long.
        objects = [*map(object.__new__, repeat(Logprob, len(ids)))]
        for set_value, values in zip(_SETTERS, (logprobs, ranks, map(self._text_of, ids)), strict=True):
            deque(map(set_value, objects, values), 0)
        by_id = dict(zip(ids, objects, strict=True))
        by_id[ids[0]] = objects[0]  # the token itself, which may also be among the most likely ones
        return by_id


def _lazy_logprobs(name: str) -> Callable[[type[T]], type[T]]:
    """Let a field of a dataclass hold `PackedLogprobs`, which are unpacked when the field is read."""

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
    """A call of a function, requested by the model."""

    id: str
    name: str
    arguments: str  # JSON text; incomplete if the answer was cut off


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """The answer to a conversation: content, reasoning and tool calls."""

    content: str | None  # None if there are only tool calls
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict, to append to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


class CallableBool(int):
    """A bool that can also be called, which returns it."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


@_lazy_logprobs("logprobs")
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
    message: AssistantMessage | None = None  # chats only

    # Fields of vLLM's class that are always None here.
    lora_request: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    routed_experts: ClassVar[None] = None

    @property
    def finished(self) -> CallableBool:
        """Whether the answer is complete. As in vLLM, it may be read or called."""
        return CallableBool(self.finish_reason is not None)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request over all its answers, in seconds of one monotonic clock."""

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


@_lazy_logprobs("prompt_logprobs")
@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0

    # Fields of vLLM's class that are always empty here.
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[dict[str, Any]] = {}
    kv_transfer_params: ClassVar[None] = None


# ---- embedding, classification and scoring ----


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """A text's embedding: `vector` as an array, `embedding` as a list."""

    vector: NDArray[np.float32]

    @property
    def embedding(self) -> list[float]:
        """A new list on every access."""
        values: list[float] = self.vector.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.vector)


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """One number for each label: probabilities, or with scale "logit" the raw output of the head."""

    vector: NDArray[np.float32]
    labels: tuple[str, ...]
    scale: Scale

    @property
    def probs(self) -> list[float]:
        """A new list on every access."""
        values: list[float] = self.vector.tolist()
        return values

    @property
    def num_classes(self) -> int:
        return len(self.vector)

    @property
    def label(self) -> str:
        """The label with the highest number."""
        return self.labels[int(self.vector.argmax())]


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well a document answers a query."""

    score: float
    scale: Scale


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """The result for a text or a pair of texts."""

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]  # for a cosine: those of the query, then those of the document
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class RerankResult:
    """One document of a ranking; `index` is its position in the request."""

    index: int
    relevance_score: float
    document: str
    scale: Scale


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The result of `AsyncEngine.embed`, in the order of the texts."""

    vectors: NDArray[np.float32]  # [texts, dimensions]
    num_prompt_tokens: int  # of all texts together
    num_cached_tokens: int  # of these, found in the prefix cache


@dataclass(frozen=True, slots=True, eq=False)
class Classifications:
    """The result of `AsyncEngine.classify`, in the order of the texts."""

    vectors: NDArray[np.float32]  # [texts, labels], on the scale
    labels: tuple[str, ...]
    scale: Scale
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The result of `AsyncEngine.score`, in the order of the documents."""

    values: NDArray[np.float32]  # [documents], on the scale
    scale: Scale
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of `AsyncEngine.rerank`: the best document first; equal ones keep their order."""

    results: list[RerankResult]
    scale: Scale
    num_prompt_tokens: int
    num_cached_tokens: int


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return vLLM's names for our objects."""
        return vllm_attribute(__name__, name)
