"""The message channel between a process and its child: messages, frames, remote procedure calls, the child's sockets.

A frame is a secret that the two processes share, then one message in msgpack. Decoding never runs code. A frame that
does not begin with the secret, or that holds no message known to the receiver, is dropped and counted.

The parent's end is `ConnectedProcess`. The child's end is `ChildSockets` for a process with threads, and
`AsyncChildSockets` for one with an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import threading
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from inflight import errors
from inflight.errors import EngineDeadError, EngineError, InflightError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

SECRET_LENGTH = 16
LINGER = 2000  # milliseconds to deliver the last messages after a socket is closed
MAX_FRAMES = 64  # read in one turn of the event loop, so that other tasks get theirs
CONNECT_TIMEOUT = 30_000  # milliseconds
MAX_CALLS = 1 << 16  # unanswered calls to one process

MessageT = TypeVar("MessageT")
T = TypeVar("T")
RequestT = TypeVar("RequestT")

# ---- messages ----


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The base of all messages: on the wire an array that begins with the class's name."""


class Stop(Message, frozen=True):
    """Tells the child to end now."""


class ConnectionInfo(msgspec.Struct, frozen=True):
    """The first line on a child's standard input, as JSON: how to reach its parent."""

    up: str  # the endpoint that the child sends to
    down: str  # the endpoint that the child receives from
    secret: str  # in hex
    parent_id: int
    log_level: int
    log_format: str
    server_key: str | None = None  # set if the connection leaves the machine, and so is encrypted


class RemoteError(msgspec.Struct, array_like=True, frozen=True):
    """An exception raised in another process."""

    class_name: str
    text: str
    notes: list[str]
    param: str | None = None
    code: str | None = None

    @classmethod
    def from_exception(cls, error: BaseException) -> RemoteError:
        param, code = (error.param, error.code) if isinstance(error, InflightError) else (None, None)
        text = str(error).encode(errors="backslashreplace").decode()  # always printable
        return cls(type(error).__name__, text, [*getattr(error, "__notes__", ())], param, code)

    def error(self) -> InflightError:
        """Return the same exception if its class is one of ours, and an EngineError that names it otherwise."""
        error_class = getattr(errors, self.class_name, None)
        if isinstance(error_class, type) and issubclass(error_class, InflightError):
            error = error_class(self.text, param=self.param, code=self.code)
        else:
            error = EngineError(f"{self.class_name}: {self.text}")
        for note in self.notes:
            error.add_note(note)
        return error


# ---- frames ----


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A call in a frame whose other values cannot be decoded. The caller gets `error` as its reply."""

    call: int
    error: Exception


class Codec(Generic[MessageT]):
    """Encodes messages as frames, and decodes frames of the `incoming` types. Not thread-safe."""

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
        """Return the frame of a message. It is valid until the next call."""
        self._encoder.encode_into(message, self._buffer, SECRET_LENGTH)
        return self._buffer

    def decode(self, frame: bytes) -> MessageT | None:
        """Return the message in a frame, or None if there is none."""
        message = self.decode_call(frame)
        return None if isinstance(message, Unreadable) else message

    def decode_call(self, frame: bytes) -> MessageT | Unreadable | None:
        """Return the message in a frame. If it cannot be decoded, return the call that must be answered, if any."""
        has_secret = False
        try:
            has_secret = hmac.compare_digest(frame[:SECRET_LENGTH], self._secret)
            if not has_secret:
                raise ValueError("wrong connection secret")
            return self._decoder.decode(memoryview(frame)[SECRET_LENGTH:])
        except Exception as error:  # the checks of our own types run in here too, and must not end the loop
            self.num_dropped += 1
            logger.warning("dropped a frame of %d bytes: %s", len(frame), error)
            call = _call_in(frame[SECRET_LENGTH:]) if has_secret else None
            return None if call is None else Unreadable(call, RequestError(f"it cannot be read: {error}"))


def _call_in(body: bytes) -> int | None:
    """Return the number of the call in a message that cannot be decoded otherwise."""
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


def array_from_bytes(expected: type, value: Any) -> Any:
    """Decode what `array_to_bytes` encoded."""
    if expected is not array or not isinstance(value, bytes) or not value or len(value) % 8:
        raise ValueError("these bytes hold no token ids")
    return array("q", value)


# ---- remote procedure calls ----


class PendingCalls(Generic[T]):
    """The calls to another process that wait for their replies, by number."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    async def call(self, number: int, send: Callable[[], None]) -> T:
        """Send a call and return its reply. Raises EngineDeadError if `fail_all` is called first."""
        if len(self._replies) >= MAX_CALLS:
            raise QueueFullError(f"{MAX_CALLS} calls to the process are unanswered, which is the limit")
        send()
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            return await reply
        finally:
            self._replies.pop(number, None)

    def resolve(self, number: int, reply: T) -> None:
        waiting = self._replies.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail_all(self, reason: str) -> None:
        """Fail all calls: no replies will come."""
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        self._replies.clear()


class ErrorOnWire(Protocol):
    """An exception as data."""

    @classmethod
    def from_exception(cls, error: Exception) -> Self: ...

    def error(self) -> Exception: ...


ErrorT = TypeVar("ErrorT", bound=ErrorOnWire)


class RpcCall(Message, Generic[RequestT], frozen=True):
    call: int
    request: RequestT


class RpcReply(Message, Generic[ErrorT], frozen=True):
    call: int
    value: Any = None
    error: ErrorT | None = None  # raised in place of a value


class RpcPeer(Generic[RequestT, ErrorT]):
    """One end of a connection on which both ends may call the other.

    `send` sends a message to the other end, `answer` handles its calls, and `error_type` carries exceptions.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        answer: Callable[[RequestT], Awaitable[object]],
        error_type: type[ErrorT],
    ) -> None:
        self._send = send
        self._answer = answer
        self._error_type = error_type
        self._numbers = itertools.count()
        self._calls: PendingCalls[RpcReply[ErrorT]] = PendingCalls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def call(self, request: RequestT, result_type: type[T] | Any) -> T:
        """Return the other end's answer, decoded as `result_type`.

        Raises what the other end raised, and EngineDeadError if it is gone.
        """
        if self._is_closed:
            raise EngineDeadError("the process is gone")
        number = next(self._numbers)
        reply = await self._calls.call(number, lambda: self._send(RpcCall(number, request)))
        if reply.error is not None:
            raise reply.error.error()
        value: T = msgspec.convert(reply.value, result_type)
        return value

    def handle(self, message: RpcCall[RequestT] | RpcReply[ErrorT]) -> None:
        if isinstance(message, RpcReply):
            self._calls.resolve(message.call, message)
            return
        task = asyncio.get_running_loop().create_task(self._reply(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, message: RpcCall[RequestT]) -> None:
        reply: RpcReply[ErrorT]
        try:
            reply = RpcReply(message.call, await self._answer(message.request))
        except Exception as error:
            logger.debug("a call of another process failed", exc_info=True)
            reply = RpcReply(message.call, error=self._error_type.from_exception(error))
        if not self._is_closed:
            self._send(reply)

    def close(self) -> None:
        """Fail all calls: the other end is gone. The calls that it made still run to completion, without a reply."""
        self._is_closed = True
        self._calls.fail_all("the process is gone")


# ---- the child's end ----


class ChildSockets(Generic[MessageT]):
    """The two sockets of a child process. Any thread may send; one receives."""

    def __init__(self, connection: ConnectionInfo, incoming: Any) -> None:
        """`incoming` is the union of the message types that the parent sends."""
        secret = bytes.fromhex(connection.secret)
        self.incoming: Codec[MessageT] = Codec(secret, incoming)
        self._outgoing: Codec[MessageT] = Codec(secret, incoming)
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PUSH)
        self._down = self._context.socket(zmq.PULL)
        self._encryption = (
            None if connection.server_key is None else EncryptedConnection(connection.server_key)
        )
        for socket, endpoint in ((self._up, connection.up), (self._down, connection.down)):
            # There is no limit here, since the sender's outbox has one: sending neither blocks nor drops.
            socket.set_hwm(0)
            socket.linger = LINGER
            if self._encryption is None:
                socket.connect(endpoint)
            else:
                self._encryption.connect(socket, endpoint)
        self._lock = threading.Lock()

    @property
    def is_remote(self) -> bool:
        """Whether the parent may be on another machine."""
        return self._encryption is not None

    def send(self, message: Message) -> None:
        with self._lock:
            self._up.send(self._outgoing.encode(message))

    def receive(self, wait: bool) -> MessageT | Unreadable | None:
        """Return the next message, or None if there is none yet or the frame held none."""
        try:
            return self.incoming.decode_call(self._down.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> bool:
        """Return whether a message arrives within that time."""
        milliseconds = int(1000 * seconds)
        return milliseconds > 0 and bool(self._down.poll(milliseconds))

    def close(self) -> None:
        with self._lock:
            if self._encryption is not None:
                self._encryption.close()
            self._up.close()
            self._down.close()
        self._context.term()


class AsyncChildSockets(ChildSockets[Any]):
    """The same for a process with an event loop, which alone sends, and passes each message to `handle`."""

    def __init__(self, connection: ConnectionInfo, incoming: Any, handle: Callable[[Any], None]) -> None:
        super().__init__(connection, incoming)
        self.codec = self.incoming
        self.process_id: int | None = os.getpid()
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._down.fileno(), self._read_frames)
        self._loop.call_soon(self._read_frames)

    def _read_frames(self) -> None:
        for _ in range(MAX_FRAMES):
            try:
                frame = self._down.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            message = self.codec.decode(frame)
            if message is not None:
                self._handle(message)
        self._loop.call_soon(self._read_frames)

    def send(self, message: Message) -> None:
        self.send_frame(self.codec.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        if not self._up.closed:
            self._up.send(frame)

    def close(self) -> None:
        self._loop.remove_reader(self._down.fileno())
        super().close()


_REFUSED = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _REFUSED


class EncryptedConnection:
    """Connects a child's sockets to a parent on another machine, and ends this process when one is cut off.

    A socket that reconnected would not know which messages were lost meanwhile. A new engine, which is given the tokens
    that the client already has, loses nothing.
    """

    def __init__(self, server_key: str) -> None:
        self._server_key = server_key.encode()
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Connect a socket and wait until it is connected. Raises EngineDeadError if that fails."""
        socket.ipv6 = "[" in endpoint
        socket.curve_serverkey = self._server_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.reconnect_ivl = -1
        socket.connect_timeout = CONNECT_TIMEOUT
        monitor = socket.get_monitor_socket(_WATCHED)
        socket.connect(endpoint)
        is_connected = monitor.poll(CONNECT_TIMEOUT) and _next_event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not is_connected:
            socket.context.destroy(linger=0)
            raise EngineDeadError(f"the engine cannot reach the server at {endpoint} from its node")
        self._sockets.append(socket)
        threading.Thread(
            target=_exit_when_cut, args=(monitor,), name="inflight-connection", daemon=True
        ).start()

    def close(self) -> None:
        """Stop watching. Must be called before the sockets are closed."""
        for socket in self._sockets:
            socket.disable_monitor()


def _next_event(monitor: Any) -> int:
    event: int = parse_monitor_message(monitor.recv_multipart())["event"]
    return event


def _exit_when_cut(monitor: Any) -> None:
    if _next_event(monitor) != zmq.EVENT_MONITOR_STOPPED:
        logger.error("the server is gone, or the connection to it was cut: the engine process exits")
        logging.shutdown()
        os._exit(1)
    monitor.close()
