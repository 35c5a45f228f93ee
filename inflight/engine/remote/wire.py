"""Every message between a client and an engine process.

    client ── Start, Add, Abort, Describe, Run..., Ack, Stop, Watch..., Read... ──►  engine
    client ◄── Progress, Ready, Failed, StepOutputs, Heartbeat, Stopped ───────────────  engine

`processes/channel.py` has the frames that they travel in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from inflight.engine.client import (
    Command,
    MemoryState,
    ModelFacts,
    RequestState,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from inflight.engine.stats import EngineStats
from inflight.errors import RequestError
from inflight.events import CacheUpdate, Delta
from inflight.processes.channel import ChildSockets, Codec, Message, RemoteError, Stop
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams
from inflight.timeline.chunks import TimelinePage, TimelineQuery

LARGEST = 2**63 - 1  # msgpack's integers have 64 bits

# ---- to the engine ----


class Start(Message, frozen=True):
    """Tells a new process to build an engine."""

    build: str  # "model", or the module:function that builds the engine
    options: dict[str, Any]  # the arguments of EngineConfig.create
    heartbeat: float
    now: float = 0.0  # when it was sent, by the sender's clock
    generation: int = 0  # engines that there were before it in its place


class Add(Message, frozen=True):
    """Adds a request. `call` is also its handle, which is unique, whereas request ids may be used again."""

    call: int
    request: RequestSpec


class Abort(Message, frozen=True):
    call: int | None  # None: no reply is expected
    handle: int
    reason: str


class Describe(Message, frozen=True):
    call: int
    handle: int


CommandT = TypeVar("CommandT")


class RunCommand(Message, Generic[CommandT], frozen=True):
    """Runs a command. There is a message for each, because dataclasses on the wire do not say which one they are."""

    call: int
    command: CommandT


class RunResetPrefixCache(RunCommand[ResetPrefixCache], frozen=True):
    pass


class RunSleep(RunCommand[Sleep], frozen=True):
    pass


class RunWakeUp(RunCommand[WakeUp], frozen=True):
    pass


COMMAND_MESSAGES: dict[type[Command], type[RunCommand[Any]]] = {
    ResetPrefixCache: RunResetPrefixCache,
    Sleep: RunSleep,
    WakeUp: RunWakeUp,
}


class Ack(Message, frozen=True):
    """The number of StepOutputs that the client has read so far."""

    num_read: int


class WatchCache(Message, frozen=True):
    """Turns updates of the prefix cache on or off. The first update holds the whole cache."""

    enabled: bool


class WatchTimeline(Message, frozen=True):
    """Turns chunks of the timeline on or off."""

    enabled: bool


class ReadTimeline(Message, frozen=True):
    call: int
    query: TimelineQuery


class ReadMemory(Message, frozen=True):
    call: int
    replica: str


# ---- from the engine ----


class Progress(Message, frozen=True):
    """The bytes of weights that are loaded, of a total."""

    num_done: int
    num_total: int


class Ready(Message, frozen=True):
    """The engine is built and takes requests."""

    facts: ModelFacts
    stats: EngineStats


class Failed(Message, frozen=True):
    """The engine could not be built."""

    remote_error: RemoteError


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The reply to one call."""

    call: int
    num_freed: int = 0
    state: RequestState | None = None
    remote_error: RemoteError | None = None
    timeline: TimelinePage | None = None
    memory: MemoryState | None = None


class StepOutputs(Message, frozen=True):
    """The outputs of one step or several. Most deltas are nothing but tokens: those are sent as columns."""

    handles: list[int] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    counts: list[int] = msgspec.field(default_factory=list)  # tokens of each handle; empty if each has one
    # The other deltas, each with its request's handle.
    deltas: list[tuple[int, Delta]] = msgspec.field(default_factory=list)
    replies: list[Reply] = msgspec.field(default_factory=list)
    stats: EngineStats | None = None
    cache: CacheUpdate | None = None
    # Requests that a `ClientService` lost, with the error that ends their streams. An engine sends none.
    lost: list[tuple[int, RemoteError]] = msgspec.field(default_factory=list)
    timeline: list[tuple[str, bytes]] = msgspec.field(default_factory=list)  # replicas and their chunks

    def tokens_of_handles(self) -> Iterator[list[int]]:
        """Return the tokens of each handle."""
        if not self.counts:
            return ([token_id] for token_id in self.token_ids)
        token_ids = iter(self.token_ids)
        return (list(islice(token_ids, count)) for count in self.counts)


class Heartbeat(Message, frozen=True):
    """A sign of life, with the state of the engine loop."""

    since_step: float  # seconds
    working: bool


class Stopped(Message, frozen=True):
    """The engine loop failed, and its process is about to exit."""

    text: str


CommandMessage = RunResetPrefixCache | RunSleep | RunWakeUp
ServiceCall = Abort | Describe | CommandMessage | ReadTimeline | ReadMemory
ServiceMessage = Add | Ack | WatchTimeline | ServiceCall
ToEngine = Start | ServiceMessage | WatchCache | Stop
FromEngine = Progress | Ready | Failed | StepOutputs | Heartbeat | Stopped

EngineSockets = ChildSockets[ToEngine]


# ---- requests on the wire ----


def encode_add(codec: Codec[Any], call: int, request: Request) -> bytearray:
    """Return the frame of a request. Raises RequestError if it cannot be encoded."""
    message = Add(call, request.current_spec())
    try:
        try:
            return codec.encode(message)
        except OverflowError:
            small = replace(message.request, params=with_small_numbers(request.params))
            return codec.encode(Add(call, small))
    except UnicodeEncodeError as error:
        raise RequestError(f"a text of the request is not valid Unicode: {error}") from None
    except (OverflowError, TypeError) as error:
        raise RequestError(f"the request cannot be sent to the engine: {error}") from None


def with_small_numbers(params: SamplingParams) -> SamplingParams:
    """Return the parameters with integers beyond 64 bits, such as top_k=10**30, reduced to the largest that fits."""
    changes: dict[str, Any] = {}
    for item in fields(params):
        value = getattr(params, item.name)
        if isinstance(value, int) and value > LARGEST and item.name != "seed":
            changes[item.name] = float(value) if item.type == "float" else LARGEST
    return replace(params, **changes)
