"""An engine in a thread of this process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from queue import Empty, SimpleQueue
from typing import Any

from inflight.engine.client import Health
from inflight.engine.core import EngineCore, EngineStats
from inflight.engine.mailbox import Mailbox
from inflight.errors import EngineError
from inflight.events import Delta
from inflight.request import Request

logger = logging.getLogger(__name__)

STALLED_AFTER = 60.0  # seconds without a step, with work to do, before the engine counts as unhealthy


class InprocClient:
    """Implements `EngineClient`. The thread owns the core: everything reaches it as a call to run between steps.

    One event loop uses one client. News of a step crosses to it in a single call.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: str | None = None
        self._last_progress = core.clock()
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)
        self._thread.start()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._take_calls():
                deltas = self._core.step()
                self._last_progress = self._core.clock()
                if deltas:
                    self._publish(deltas)
        except Exception as error:
            logger.exception("the engine loop stopped")
            self._stop(f"the engine stopped: {type(error).__name__}: {error}")
        else:
            self._stop("the engine was closed")

    def _take_calls(self) -> bool:
        """Run what was asked since the last step; wait for something to ask while idle. False to stop."""
        while True:
            try:
                call = self._calls.get(block=not self._core.has_work)
            except Empty:
                return True
            if call is None:
                return False
            self._last_progress = self._core.clock()
            call()

    def _stop(self, reason: str) -> None:
        self._error = reason
        self._post(self._end_streams)
        while True:  # whoever asked too late is told so
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call()

    def _publish(self, deltas: list[Delta]) -> None:
        self._post(lambda: self._deliver(deltas))

    def _post(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    # ---- the event loop ----

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                mailbox.put(delta)

    def _end_streams(self) -> None:
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(Delta(request_id, [], finish_reason="error", error=self._error))

    async def _ask(self, function: Callable[[], Any]) -> Any:
        """Run `function` in the engine's thread, between two steps."""
        loop = self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)

        def call() -> None:
            value, error = None, None
            try:
                if self._error is not None:
                    raise EngineError(self._error)
                value = function()
            except Exception as raised:
                error = raised
            self._post(lambda: settle(value, error))

        if self._error is not None:
            raise EngineError(self._error)
        self._calls.put(call)
        return await answer

    async def add(self, request: Request) -> None:
        if request.request_id in self._mailboxes:
            raise EngineError(f"request id {request.request_id!r} is already in use")
        self._mailboxes[request.request_id] = Mailbox()
        try:
            await self._ask(lambda: self._core.add(request))
        except BaseException:
            del self._mailboxes[request.request_id]
            self._abandon(request.request_id)  # it may have been cancelled while it was added
            raise

    def _abort(self, request_id: str) -> int:
        num_freed, deltas = self._core.abort(request_id)
        self._publish(deltas)
        return num_freed

    def _abandon(self, request_id: str) -> None:
        """Abort without waiting for it."""

        def call() -> None:
            self._abort(request_id)

        self._calls.put(call)

    async def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        mailbox = self._mailboxes[request_id]
        finished = False
        try:
            while not finished:
                delta = await mailbox.take()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._mailboxes[request_id]
            if not finished:
                self._abandon(request_id)

    async def abort(self, request_id: str) -> int:
        num_freed: int = await self._ask(lambda: self._abort(request_id))
        return num_freed

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask(self._core.stats)
        return stats

    async def health(self) -> Health:
        since = self._core.clock() - self._last_progress
        working = self._core.has_work
        return Health(self._error is None and (not working or since < STALLED_AFTER), since, self._error)

    async def close(self) -> None:
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._core.has_work:
            self._end_streams()
        self._core.close()
