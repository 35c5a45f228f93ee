"""Questions between two processes, in both directions."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from inflight.errors import EngineDeadError
from inflight.processes.channel import Message
from inflight.server.api_workers.wire import Ask, AskReply, Question, ToldError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Asking:
    """One end. `answer` is called with the other end's questions, `send` sends there."""

    def __init__(
        self, send: Callable[[Message], None], answer: Callable[[Question], Awaitable[object]]
    ) -> None:
        self._send = send
        self._answer = answer
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[AskReply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def ask(self, question: Question, kind: type[T] | Any) -> T:
        """What the other end answers, of this kind. Raises what it raised, and EngineDeadError once it is gone."""
        if self._is_closed:
            raise EngineDeadError("the process is gone")
        call = next(self._numbers)
        reply = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(call, question))
            found = await reply
        finally:
            del self._calls[call]
        if found.error is not None:
            raise found.error.error()
        value: T = msgspec.convert(found.value, kind)
        return value

    def handle(self, message: Ask | AskReply) -> None:
        if isinstance(message, AskReply):
            call = self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(message)
            return
        task = asyncio.get_running_loop().create_task(self._reply(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, message: Ask) -> None:
        try:
            reply = AskReply(message.call, await self._answer(message.question))
        except Exception as error:
            logger.debug("a question of another process was answered with an error", exc_info=True)
            reply = AskReply(message.call, error=ToldError.of(error))
        if not self._is_closed:
            self._send(reply)

    def close(self) -> None:
        """The other end is gone. What it has asked for is brought to its end, and told no one."""
        self._is_closed = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDeadError("the process is gone"))
