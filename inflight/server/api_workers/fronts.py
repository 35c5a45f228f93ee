"""All front processes: started, watched, restarted, and what they have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from inflight.engine import EngineStats
from inflight.engine.remote.wire import Progress
from inflight.errors import EngineDeadError, EngineError
from inflight.processes.channel import Message, Stop
from inflight.server.access.admission import LocalAdmission
from inflight.server.access.keys import Caller, Keys
from inflight.server.api_workers.front_process import FrontProcess
from inflight.server.api_workers.relay import answer_with
from inflight.server.api_workers.wire import (
    MAIN,
    Drain,
    EngineHealth,
    Enter,
    FindConversation,
    FindInputPage,
    FindItems,
    FindRequest,
    FindResponse,
    KeepResponse,
    Question,
    RelayedRequest,
    RelayedResponse,
    RemoveResponse,
    StartFront,
    TakeCounts,
)
from inflight.server.app import create_app
from inflight.server.config import ServerConfig
from inflight.server.observability.metrics import MetricCounts, add_counts
from inflight.server.openai.responses.store import ResponseContent
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

PAUSE = 0.5  # seconds before a front process is started again
COUNTS_SECONDS = 2.0  # for a front process to say what it has counted
EXIT_SECONDS = 10.0  # for a front process to end, beyond the time for its requests


class Fronts:
    """`run` keeps them alive until `drain`."""

    def __init__(self, options: ServerConfig, keys: Keys, listeners: Sequence[socket.socket]) -> None:
        self._options = options
        self._keys = keys
        self._listeners = listeners  # held here too: what waits in one outlives its process
        self._told = _told(options, len(listeners))
        self._admission = LocalAdmission()
        self._fronts: dict[int, FrontProcess] = {}  # by number
        self._num_launches = 0
        self._places: OrderedDict[tuple[str, str], FrontProcess] = (
            OrderedDict()
        )  # of requests, by caller and id
        self._state: ServerState | None = None
        self._stats: EngineStats
        self._is_draining = False

    @property
    def are_open(self) -> bool:
        return len(self._fronts) == len(self._listeners) and all(
            front.is_open for front in self._fronts.values()
        )

    # ---- their life ----

    async def run(self) -> None:
        """Until all have ended, as they were told to. Raises EngineDeadError where one ends again and again."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._listeners)):
                group.create_task(self._keep_one(number))

    async def _keep_one(self, number: int) -> None:
        restarts: deque[float] = deque()
        limits = self._options.process
        while not self._is_draining:
            front = self._launch(number)
            try:
                await self._follow(front)
            finally:
                await self._lose(front)
            if self._is_draining:
                return
            logger.error("%s: another one takes its place", front.process.reason)
            now = time.monotonic()
            while restarts and restarts[0] <= now - limits.restart_window:
                restarts.popleft()
            if len(restarts) >= limits.max_restarts:
                raise EngineDeadError(f"front process {number} is given up: {front.process.reason}")
            restarts.append(now)
            await asyncio.sleep(PAUSE)

    def _launch(self, number: int) -> FrontProcess:
        self._num_launches += 1
        start = StartFront(
            number,
            self._num_launches,
            self._told,
            self._keys.digests(),
            self._listeners[number].fileno(),
            self._state is not None,
        )
        front = self._fronts[number] = FrontProcess(
            start, self._options.process.log_format, self._keys, self._admission, self._answer
        )
        return front

    async def _follow(self, front: FrontProcess) -> None:
        """One process to its end."""
        process = front.process
        greeting = asyncio.create_task(self._greet(front))
        heard_at = time.monotonic()
        try:
            while not process.exited.is_set() or process.unread:
                message = await process.receive(self._options.process.heartbeat)
                if message is not None:
                    heard_at = time.monotonic()
                    front.handle(message)
                elif time.monotonic() - heard_at > self._patience_with(front):
                    process.kill("the front process was killed: it was silent for too long")
        finally:
            greeting.cancel()
            process.kill()
            await process.exited.wait()

    def _patience_with(self, front: FrontProcess) -> float:
        """Seconds without a sign of life. Connections that the system gives to one that is silent wait for it, while
        others could take them; but one that still starts may take its time."""
        limits = self._options.process
        if limits.kill_silent_after is None:
            return math.inf
        return (
            min(limits.silent_after, limits.kill_silent_after) if front.is_open else limits.kill_silent_after
        )

    async def _greet(self, front: FrontProcess) -> None:
        """Nothing else can be sent before."""
        await front.process.greet(lambda: front.start)
        front.is_greeted = True
        if self._state is not None:
            self._serve(front, self._state)

    async def _lose(self, front: FrontProcess) -> None:
        if self._fronts.get(front.number) is front:
            del self._fronts[front.number]
        if front.counts is not None and self._state is not None:
            add_counts(self._state.metrics, dict.fromkeys(self._keys.callers), front.counts)
        for key in [key for key, place in self._places.items() if place is front]:
            del self._places[key]
        await front.close()

    def _serve(self, front: FrontProcess, state: ServerState) -> None:
        front.serve(state.client, lambda: self._stats)

    async def open(self, state: ServerState) -> None:
        """The engine is there."""
        self._stats = await state.client.stats()
        state.counts_of_others = self.counts
        state.num_answered_by_others = lambda: sum(front.num_answered for front in self._fronts.values())
        self._app: ASGIApp = create_app(state)
        self._state = state
        for front in self._fronts.values():
            if front.is_greeted:
                self._serve(front, state)

    def progress(self, num_done: int, num_total: int) -> None:
        """So much of the model is there."""
        self._send_all(Progress(num_done, num_total))

    async def tell_health(self, state: ServerState) -> None:
        """Once in a while."""
        with contextlib.suppress(EngineError):
            before, self._stats = self._stats, await state.client.stats()
            if self._stats != before:
                for front in self._fronts.values():
                    front.send_stats()
        self._send_all(EngineHealth(await state.client.health()))

    def drain(self) -> None:
        """Refuse new requests and let the others finish. Called again: end at once."""
        if not self._is_draining:
            self._is_draining = True
            for listener in self._listeners:
                listener.close()
        self._send_all(Drain())

    def stop(self) -> None:
        """End now."""
        self._is_draining = True
        self._send_all(Stop())
        for front in self._fronts.values():
            front.process.kill()

    def _send_all(self, message: Message) -> None:
        for front in self._fronts.values():
            front.send(message)

    # ---- what they have in common ----

    async def counts(self) -> list[MetricCounts]:
        """What all of them have counted. What those before them had is the main process's own."""

        async def of_one(front: FrontProcess) -> MetricCounts | None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(COUNTS_SECONDS):
                    front.counts = await front.asking.ask(TakeCounts(), MetricCounts)
            return front.counts

        opened = [front for front in self._fronts.values() if front.is_open]
        found = await asyncio.gather(*map(of_one, opened))
        return [counts for counts in found if counts is not None]

    async def _answer(self, front: FrontProcess, question: Question) -> object:
        state = self._state
        assert state is not None
        match question:
            case Enter(caller, request_id):
                await front.enter(caller, request_id)
                if request_id is not None:
                    self._remember(caller, request_id, front)
            case FindRequest(caller, request_id, only_running):
                place = self._places.get((caller, request_id))
                if place is None or (only_running and not place.has_running(caller, request_id)):
                    return None
                return place.number
            case FindResponse(caller, response_id, version):
                content = await state.responses.content(Caller(caller), response_id)
                if content is not None and content.version == version:
                    return ResponseContent(b"", content.version)
                return content
            case FindConversation(caller, response_id):
                return await state.responses.conversation(Caller(caller), response_id)
            case FindInputPage(caller, response_id, query):
                return await state.responses.input_page(Caller(caller), response_id, query)
            case FindItems(caller, item_ids, max_bytes):
                return await state.responses.find_items(Caller(caller), item_ids, max_bytes)
            case KeepResponse(caller, stored):
                await state.responses.add(Caller(caller), stored)
            case RemoveResponse(caller, response_id):
                await state.responses.remove(Caller(caller), response_id)
            case RelayedRequest(target):
                return await self._relay(target, question)
            case _:
                raise AssertionError(f"the main process is not asked for {question}")
        return None

    async def _relay(self, target: int, request: RelayedRequest) -> RelayedResponse:
        if target == MAIN:
            return await answer_with(self._app, request)
        front = self._fronts.get(target)
        if front is None:
            raise EngineDeadError("the front process is gone")
        found: RelayedResponse = await front.asking.ask(request, RelayedResponse)
        return found

    def _remember(self, caller: str, request_id: str, front: FrontProcess) -> None:
        """Which process has a request, and what became of it. The latest of them."""
        self._places[caller, request_id] = front
        self._places.move_to_end((caller, request_id))
        while len(self._places) > self._options.request_history + self._num_running:
            (key, place) = self._places.popitem(last=False)
            if place.has_running(*key):
                self._places[key] = place

    @property
    def _num_running(self) -> int:
        return sum(front.num_running for front in self._fronts.values())


def _told(options: ServerConfig, count: int) -> dict[str, Any]:
    """Options of one front process of so many. What the main process alone must know is not among them."""
    return options.flat() | {
        "api_key": (),
        "keys": None,
        "admin_key": None,
        "max_connections": -(-options.max_connections // count),
        "max_unsent_bytes": -(-options.max_unsent_bytes // count),
    }
