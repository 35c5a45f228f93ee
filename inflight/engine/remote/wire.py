"""Every message between a front process and an engine process, and how it looks on the wire.

A frame is a secret of this pair of processes, then one message in msgpack. Nothing on the wire can be made to
run. What does not begin with the secret, or is no message that the receiver knows, is dropped and counted.

    front ── Start, Add, Abort, Describe, Tell, Ack, Watch, WatchCache, Stop ─►  engine
    front ◄── Progress, Ready, Failed, StepOutputs, Heartbeat, Stopped ───  engine
"""

from __future__ import annotations

import contextlib
import hmac
import logging
from array import array
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import msgspec

from inflight import errors
from inflight.engine.client import ModelFacts, RequestState
from inflight.engine.sleep import Command
from inflight.engine.stats import EngineStats
from inflight.errors import EngineError, InflightError, RequestError
from inflight.events import CacheUpdate, Delta, StepRecord
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SECRET_LENGTH = 16
LARGEST = 2**63 - 1  # msgpack's integers have 64 bits

MessageT = TypeVar("MessageT")


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The root of all messages: on the wire an array that begins with the class's name."""


class ConnectionInfo(msgspec.Struct, frozen=True):
    """What a new engine process is told, as JSON: how to reach whoever started it."""

    up: str  # where it sends
    down: str  # where it receives
    secret: str  # in hex
    parent_id: int
    log_level: int
    log_format: str
    server_key: str | None = None  # where the connection is encrypted, since it leaves the machine


# ---- to the engine ----


class Start(Message, frozen=True):
    """Build an engine."""

    build: str  # module:function, which makes the engine
    options: dict[str, Any]  # of EngineConfig.create
    heartbeat: float
    now: float = 0.0  # by the sender's clock, when it was sent


class Add(Message, frozen=True):
    """`call` is also the request's handle: no other request ever has it, whereas ids may be used again."""

    call: int
    request: RequestSpec


class Abort(Message, frozen=True):
    call: int | None  # None: no reply is wanted
    handle: int
    reason: str


class Describe(Message, frozen=True):
    call: int
    handle: int


class Tell(Message, frozen=True):
    """Something that is no request."""

    call: int
    command: Command


class Ack(Message, frozen=True):
    """How many StepOutputs the front has taken in so far."""

    num_taken: int


class Watch(Message, frozen=True):
    """Whether StepRecords are wanted."""

    wanted: bool


class WatchCache(Message, frozen=True):
    """Whether changes of the prefix cache are wanted. The first ones are all that is there."""

    wanted: bool


class Stop(Message, frozen=True):
    """End now."""


# ---- from the engine ----


class RemoteError(msgspec.Struct, array_like=True, frozen=True):
    """An exception that goes to whoever asked."""

    kind: str
    text: str
    notes: list[str]
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        param, code = (error.param, error.code) if isinstance(error, InflightError) else (None, None)
        notes = [*getattr(error, "__notes__", ())]
        return cls(type(error).__name__, _printable(error), notes, param, code)

    def error(self) -> InflightError:
        """The same error where its class is one of ours."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, InflightError):
            error = kind(self.text, param=self.param, code=self.code)
        else:
            error = EngineError(f"{self.kind}: {self.text}")
        for note in self.notes:
            error.add_note(note)
        return error


class Progress(Message, frozen=True):
    """Bytes of weights loaded, and in all."""

    num_done: int
    num_total: int


class Ready(Message, frozen=True):
    facts: ModelFacts
    stats: EngineStats


class Failed(Message, frozen=True):
    """The engine could not be built."""

    remote_error: RemoteError


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """To one call."""

    call: int
    num_freed: int = 0
    state: RequestState | None = None
    remote_error: RemoteError | None = None


class StepOutputs(Message, frozen=True):
    """What a step, or several, brought. Most deltas are one token and nothing else: those are two columns."""

    handles: list[int] = []
    token_ids: list[int] = []
    deltas: list[tuple[int, Delta]] = []  # the others, each with its request's handle
    replies: list[Reply] = []
    steps: list[StepRecord] = []
    stats: EngineStats | None = None
    cache: CacheUpdate | None = None
    # Requests whose streams end with an error that no engine told of, which an engine itself never has.
    lost: list[tuple[int, RemoteError]] = []


class Heartbeat(Message, frozen=True):
    """The process lives, and this is how its loop does."""

    since_step: float  # seconds
    working: bool
    num_dropped: int  # frames


class Stopped(Message, frozen=True):
    """The loop ended with an error; the process will, too."""

    text: str


ToEngine = Start | Add | Abort | Describe | Tell | Ack | Watch | WatchCache | Stop
ToFront = Progress | Ready | Failed | StepOutputs | Heartbeat | Stopped


# ---- frames ----


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A call that came in a frame whose other values cannot be read: whoever waits for its reply gets the error."""

    call: int
    error: Exception


class Codec(Generic[MessageT]):
    """Messages to frames, and frames of `incoming` types to messages. Not thread-safe."""

    def __init__(self, secret: bytes, incoming: Any) -> None:
        assert len(secret) == SECRET_LENGTH
        self.num_dropped = 0
        self._secret = secret
        self._encoder = msgspec.msgpack.Encoder(enc_hook=array_to_bytes)
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(
            incoming, dec_hook=array_from_bytes
        )
        self._buffer = bytearray(secret)

    def encode(self, message: Message) -> bytearray:
        """The frame of a message, valid until the next call."""
        self._encoder.encode_into(message, self._buffer, SECRET_LENGTH)
        return self._buffer

    def decode(self, frame: bytes) -> MessageT | None:
        """The message of a frame, or None if it is none."""
        message = self.decode_call(frame)
        return None if isinstance(message, Unreadable) else message

    def decode_call(self, frame: bytes) -> MessageT | Unreadable | None:
        """The message of a frame; if it is none, the call in it that must be answered, or None without one."""
        is_ours = False
        try:
            is_ours = hmac.compare_digest(frame[:SECRET_LENGTH], self._secret)
            if not is_ours:
                raise ValueError("it is from a stranger")
            return self._decoder.decode(memoryview(frame)[SECRET_LENGTH:])
        except Exception as error:  # checks of our own types run in here too, and nothing may end the loop
            self.num_dropped += 1
            logger.warning("dropped a frame of %d bytes: %s", len(frame), error)
            call = _call_in(frame[SECRET_LENGTH:]) if is_ours else None
            return None if call is None else Unreadable(call, RequestError(f"it cannot be read: {error}"))


def _call_in(body: bytes) -> int | None:
    """The number of the call in a message of which nothing else can be read."""
    with contextlib.suppress(Exception):
        match msgspec.msgpack.decode(body):
            case [str(), int(call), *_]:
                return call
    return None


def array_to_bytes(value: Any) -> Any:
    """Encode token ids as they lie in memory, on both ends alike: prompts may be long."""
    if isinstance(value, array):
        return value.tobytes()
    raise TypeError(f"a {type(value).__name__} cannot be encoded")


def array_from_bytes(kind: type, value: Any) -> Any:
    """Decode what `array_to_bytes` encoded."""
    if kind is not array or not isinstance(value, bytes) or not value or len(value) % 8:
        raise ValueError("these bytes hold no token ids")
    return array("q", value)


def encode_add(codec: Codec[Any], call: int, request: Request) -> bytearray:
    """The frame of a request. Raises RequestError where it cannot travel."""
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
    """Integers without limit that mean no more than the largest one that can travel, such as top_k=10**30."""
    changes: dict[str, Any] = {}
    for item in fields(params):
        value = getattr(params, item.name)
        if isinstance(value, int) and value > LARGEST and item.name != "seed":
            changes[item.name] = float(value) if item.type == "float" else LARGEST
    return replace(params, **changes)


def _printable(error: BaseException) -> str:
    return str(error).encode(errors="backslashreplace").decode()
