"""The API workers as the main process sees them: started, watched and restarted, with the state that they share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Reversible, Sequence
from itertools import islice
from typing import Any

from starlette.types import ASGIApp

from inflight.engine.client import EngineClient
from inflight.engine.remote.client_service import ClientService
from inflight.engine.remote.wire import Progress, Ready
from inflight.engine.stats import EngineStats
from inflight.errors import EngineDeadError, EngineError
from inflight.processes.channel import Message, RpcCall, RpcPeer, RpcReply, Stop
from inflight.processes.child import ChildHost
from inflight.processes.connected_process import ConnectedProcess
from inflight.server.access.keys import AdmissionControl, Caller, Keys, LocalAdmission
from inflight.server.api_workers import messages
from inflight.server.api_workers.relay import answer_with
from inflight.server.app import create_app
from inflight.server.config import ServerConfig
from inflight.server.observability.metrics import MetricCounts, add_counts
from inflight.server.observability.request_log import RequestKey, Selection
from inflight.server.openai.responses.store import ResponseContent
from inflight.server.state import ServerState

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.server.api_workers.worker")

Answerer = Callable[["ApiWorkerProcess", messages.WorkerRequest], Awaitable[object]]


class ApiWorkerProcess:
    """An API worker as the main process sees it. `answer` handles its calls; its requests end with it."""

    def __init__(
        self,
        start: messages.StartWorker,
        log_format: str,
        keys: Keys,
        admission: AdmissionControl,
        answer: Answerer,
    ) -> None:
        self.number = start.number
        self.launch = start.launch
        self.start = start
        self.is_started = False  # it has received its first message
        self.is_open = False  # it takes requests
        self.counts: MetricCounts | None = None  # as of its last heartbeat
        host = ChildHost("API worker", COMMAND, descriptors=(start.listener,))
        self.process: ConnectedProcess[messages.FromWorker] = ConnectedProcess(
            host, messages.FromWorker, log_format
        )
        self.rpc: messages.Rpc = RpcPeer(self.send, lambda request: answer(self, request), messages.RpcError)
        self._keys = keys
        self._admission = admission
        self._service: ClientService | None = None
        self._admitted: Counter[tuple[str, str | None]] = Counter()  # by caller and request id

    @property
    def num_running(self) -> int:
        """The number of its HTTP requests that are running."""
        return self._admitted.total()

    @property
    def num_answered(self) -> int:
        """The number of these that use the engine."""
        return sum(times for (_, request_id), times in self._admitted.items() if request_id is not None)

    def has_running(self, name: str, request_id: str) -> bool:
        return (name, request_id) in self._admitted

    def send(self, message: Message) -> None:
        self.process.send(message)

    def serve(self, client: EngineClient, stats: Callable[[], EngineStats]) -> None:
        """Give the worker access to the engine, which is ready, so that it takes requests."""
        self._service = ClientService(client, self.send, stats)
        self.send(Ready(client.facts, stats()))

    def send_stats(self) -> None:
        """Send the worker the engine's statistics, which have changed."""
        if self._service is not None:
            self._service.send_stats()

    def handle(self, message: messages.FromWorker) -> None:
        match message:
            case RpcCall() | RpcReply():
                self.rpc.handle(message)
            case messages.Leave(caller, request_id):
                self._leave(caller, request_id)
            case messages.WorkerHeartbeat(counts):
                self.counts = counts or self.counts
            case messages.Opened():
                self.is_open = True
            case _:
                assert self._service is not None
                self._service.handle(message)

    async def enter(self, name: str, request_id: str | None) -> None:
        """Admit a request. Raises ApiError if a limit, which holds for all workers together, is reached."""
        await self._admission.enter(self._keys.named(name), request_id)
        self._admitted[name, request_id] += 1

    def _leave(self, name: str, request_id: str | None) -> None:
        if self._admitted[name, request_id]:
            self._admitted[name, request_id] -= 1
            self._admission.leave(self._keys.named(name), request_id)
            if not self._admitted[name, request_id]:
                del self._admitted[name, request_id]

    async def close(self) -> None:
        """End the requests of the worker, which is gone, and release what they counted against the limits."""
        self.rpc.close()
        for (name, request_id), times in list(self._admitted.items()):
            for _ in range(times):
                self._leave(name, request_id)
        if self._service is not None:
            await self._service.close()


logger = logging.getLogger(__name__)

PAUSE = 0.5  # seconds before a worker is restarted
COUNTS_SECONDS = 2.0  # for a worker to return its metric counts
EXIT_SECONDS = 10.0  # for a worker to exit, beyond the time for its requests


class ApiWorkerPool:
    """Starts the API workers, restarts ended ones, and answers their calls. `run` returns after `drain`."""

    def __init__(self, options: ServerConfig, keys: Keys, listeners: Sequence[socket.socket]) -> None:
        self._options = options
        self._keys = keys
        self._listeners = listeners  # held here too, so that waiting connections outlive a worker
        self._worker_options = _worker_options(options, len(listeners))
        self._admission = LocalAdmission()
        self._workers: dict[int, ApiWorkerProcess] = {}  # by number
        self._num_launches = 0
        # The worker of each request, in the order of their admission.
        self._locations: dict[RequestKey, ApiWorkerProcess] = {}
        self._state: ServerState | None = None
        self._stats: EngineStats
        self._is_draining = False

    @property
    def are_open(self) -> bool:
        return len(self._workers) == len(self._listeners) and all(
            worker.is_open for worker in self._workers.values()
        )

    # ---- life cycle ----

    async def run(self) -> None:
        """Keep the workers running until they have drained. Raises EngineDeadError if one ends too often."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._listeners)):
                group.create_task(self._keep_one(number))

    async def _keep_one(self, number: int) -> None:
        restarts: deque[float] = deque()
        limits = self._options.process
        while not self._is_draining:
            worker = self._launch(number)
            try:
                await self._follow(worker)
            finally:
                await self._lose(worker)
            if self._is_draining:
                return
            logger.error("%s: restarting it", worker.process.reason)
            now = time.monotonic()
            while restarts and restarts[0] <= now - limits.restart_window:
                restarts.popleft()
            if len(restarts) >= limits.max_restarts:
                raise EngineDeadError(f"API worker {number} was restarted too often: {worker.process.reason}")
            restarts.append(now)
            await asyncio.sleep(PAUSE)

    def _launch(self, number: int) -> ApiWorkerProcess:
        self._num_launches += 1
        start = messages.StartWorker(
            number,
            self._num_launches,
            self._worker_options,
            self._keys.digests(),
            self._listeners[number].fileno(),
            self._state is not None,
        )
        worker = self._workers[number] = ApiWorkerProcess(
            start, self._options.process.log_format, self._keys, self._admission, self._answer
        )
        return worker

    async def _follow(self, worker: ApiWorkerProcess) -> None:
        """Handle the messages of one worker until its process has ended."""
        process = worker.process
        first_message = asyncio.create_task(self._send_first(worker))
        received_at = time.monotonic()
        try:
            while not process.exited.is_set() or process.unread:
                message = await process.receive(self._options.process.heartbeat)
                if message is not None:
                    received_at = time.monotonic()
                    worker.handle(message)
                elif time.monotonic() - received_at > self._silence_limit(worker):
                    process.kill("the API worker was killed: it was silent for too long")
        finally:
            first_message.cancel()
            process.kill()
            await process.exited.wait()

    def _silence_limit(self, worker: ApiWorkerProcess) -> float:
        """Return how many seconds a worker may be silent. The kernel keeps giving connections to a silent worker, which
        others could serve, so the limit is short; a worker that is still starting gets longer."""
        limits = self._options.process
        if limits.kill_silent_after is None:
            return math.inf
        seconds = limits.kill_silent_after
        return min(limits.silent_after, seconds) if worker.is_open else seconds

    async def _send_first(self, worker: ApiWorkerProcess) -> None:
        """Send the first message, once the process has connected."""
        await worker.process.send_first(lambda: worker.start)
        worker.is_started = True
        if self._state is not None:
            self._serve(worker, self._state)

    async def _lose(self, worker: ApiWorkerProcess) -> None:
        if self._workers.get(worker.number) is worker:
            del self._workers[worker.number]
        if worker.counts is not None and self._state is not None:
            add_counts(self._state.metrics, dict.fromkeys(self._keys.callers), worker.counts)
        for key in [key for key, location in self._locations.items() if location is worker]:
            del self._locations[key]
        await worker.close()

    def _serve(self, worker: ApiWorkerProcess, state: ServerState) -> None:
        worker.serve(state.model.client, lambda: self._stats)

    async def open(self, state: ServerState) -> None:
        """Let the workers take requests: the engine is ready."""
        self._stats = await state.model.client.stats()
        state.counts_of_others = self.counts
        state.num_answered_by_others = lambda: sum(worker.num_answered for worker in self._workers.values())
        state.requests_of_workers = self
        self._app: ASGIApp = create_app(state)
        self._state = state
        for worker in self._workers.values():
            if worker.is_started:
                self._serve(worker, state)

    def progress(self, num_done: int, num_total: int) -> None:
        """Pass on how much of the model is loaded."""
        self._send_all(Progress(num_done, num_total))

    async def send_health(self, state: ServerState) -> None:
        """Send the engines' health and statistics to all workers."""
        with contextlib.suppress(EngineError):
            before, self._stats = self._stats, await state.model.client.stats()
            if self._stats != before:
                for worker in self._workers.values():
                    worker.send_stats()
        self._send_all(messages.EngineHealth(await state.model.client.health()))

    def drain(self) -> None:
        """Reject new requests and let the running ones finish. A second call ends them at once."""
        if not self._is_draining:
            self._is_draining = True
            for listener in self._listeners:
                listener.close()
        self._send_all(messages.Drain())

    def stop(self) -> None:
        """Kill all workers."""
        self._is_draining = True
        self._send_all(Stop())
        for worker in self._workers.values():
            worker.process.kill()

    def _send_all(self, message: Message) -> None:
        for worker in self._workers.values():
            worker.send(message)

    # ---- calls from the workers ----

    async def counts(self) -> list[MetricCounts]:
        """Return the metric counts of all workers. Counts of ended workers are part of the main process's."""

        async def of_one(worker: ApiWorkerProcess) -> MetricCounts | None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(COUNTS_SECONDS):
                    worker.counts = await worker.rpc.call(messages.TakeCounts(), MetricCounts)
            return worker.counts

        opened = [worker for worker in self._workers.values() if worker.is_open]
        all_counts = await asyncio.gather(*map(of_one, opened))
        return [counts for counts in all_counts if counts is not None]

    def keys(self) -> Reversible[RequestKey]:
        """Return the keys of the requests of all workers, as `RequestSource` does."""
        return self._locations.keys()

    async def summaries(
        self, keys: Sequence[RequestKey], selection: Selection | None
    ) -> Sequence[bytes | None]:
        """Return summaries from the workers that have the requests. A worker that is gone has none."""
        by_worker: dict[ApiWorkerProcess, list[RequestKey]] = {}
        for key in keys:
            if key in self._locations:
                by_worker.setdefault(self._locations[key], []).append(key)

        async def of_one(
            worker: ApiWorkerProcess, worker_keys: list[RequestKey]
        ) -> dict[RequestKey, bytes | None]:
            request = messages.SummarizeRequests(worker_keys, selection)
            try:
                return dict(zip(worker_keys, await worker.rpc.call(request, list[bytes | None]), strict=True))
            except EngineError:
                return {}

        answers = await asyncio.gather(*(of_one(*item) for item in by_worker.items()))
        summaries = {key: summary for answer in answers for key, summary in answer.items()}
        return [summaries.get(key) for key in keys]

    async def _answer(self, worker: ApiWorkerProcess, request: messages.WorkerRequest) -> object:
        state = self._state
        assert state is not None
        match request:
            case messages.Enter(caller, request_id):
                await worker.enter(caller, request_id)
                if request_id is not None:
                    self._remember(caller, request_id, worker)
            case messages.FindRequest(caller, request_id, only_running):
                if caller is None:  # the latest one of any caller
                    names = (name for name, known_id in reversed(self._locations) if known_id == request_id)
                    caller = next(names, "")
                location = self._locations.get((caller, request_id))
                if location is None or (only_running and not location.has_running(caller, request_id)):
                    return None
                return location.number
            case messages.FindResponse(caller, response_id, version):
                content = await state.responses.content(Caller(caller), response_id)
                if content is not None and content.version == version:
                    return ResponseContent(b"", content.version)
                return content
            case messages.FindConversation(caller, response_id):
                return await state.responses.conversation(Caller(caller), response_id)
            case messages.FindInputPage(caller, response_id, query):
                return await state.responses.input_page(Caller(caller), response_id, query)
            case messages.FindItems(caller, item_ids, max_bytes):
                return await state.responses.find_items(Caller(caller), item_ids, max_bytes)
            case messages.KeepResponse(caller, stored):
                await state.responses.add(Caller(caller), stored)
            case messages.RemoveResponse(caller, response_id):
                await state.responses.remove(Caller(caller), response_id)
            case messages.RelayedRequest(target):
                return await self._relay(target, request)
            case _:
                raise AssertionError(f"the main process does not handle {request}")
        return None

    async def _relay(self, target: int, request: messages.RelayedRequest) -> messages.RelayedResponse:
        if target == messages.MAIN:
            return await answer_with(self._app, request)
        worker = self._workers.get(target)
        if worker is None:
            raise EngineDeadError("the API worker is gone")
        response: messages.RelayedResponse = await worker.rpc.call(request, messages.RelayedResponse)
        return response

    def _remember(self, caller: str, request_id: str, worker: ApiWorkerProcess) -> None:
        """Remember which worker has the request, and forget the oldest requests that have ended."""
        self._locations.pop((caller, request_id), None)
        self._locations[caller, request_id] = worker
        num_running = sum(worker.num_running for worker in self._workers.values())
        excess = len(self._locations) - self._options.request_history - num_running
        if excess > 0:
            ended = (key for key, location in self._locations.items() if not location.has_running(*key))
            for key in list(islice(ended, excess)):
                del self._locations[key]


def _worker_options(options: ServerConfig, count: int) -> dict[str, Any]:
    """Return the options of one of `count` workers, without the secrets that only the main process needs."""
    return options.flat() | {
        "api_key": (),
        "keys": None,
        "admin_key": None,
        "max_connections": -(-options.max_connections // count),
        "max_unsent_bytes": -(-options.max_unsent_bytes // count),
    }
