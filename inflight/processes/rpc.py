"""Remote procedure calls over a message channel: calls that wait for a reply, in one direction or in both."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from inflight.errors import EngineDeadError, QueueFullError
from inflight.processes.channel import Message

logger = logging.getLogger(__name__)

MAX_CALLS = 1 << 16  # unanswered calls to one process

T = TypeVar("T")
RequestT = TypeVar("RequestT")


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
    def of(cls, error: Exception) -> Self: ...

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

    async def call(self, request: RequestT, kind: type[T] | Any) -> T:
        """Return the other end's answer, which is of this `kind`. Raises what the other end raised, and EngineDeadError
        if it is gone."""
        if self._is_closed:
            raise EngineDeadError("the process is gone")
        number = next(self._numbers)
        reply = await self._calls.call(number, lambda: self._send(RpcCall(number, request)))
        if reply.error is not None:
            raise reply.error.error()
        value: T = msgspec.convert(reply.value, kind)
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
            reply = RpcReply(message.call, error=self._error_type.of(error))
        if not self._is_closed:
            self._send(reply)

    def close(self) -> None:
        """Fail all calls: the other end is gone. The calls that it made still run to completion, without a reply."""
        self._is_closed = True
        self._calls.fail_all("the process is gone")
