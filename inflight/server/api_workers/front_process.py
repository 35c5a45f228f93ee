"""One front process, as the main process has it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable

from inflight.engine import EngineClient, EngineStats
from inflight.engine.remote.client_service import ClientService
from inflight.engine.remote.wire import Abort, Ack, Add, Describe, Ready, RunCommand, Watch
from inflight.processes.channel import Message
from inflight.processes.child import ChildHost
from inflight.processes.connected_process import ConnectedProcess
from inflight.server.access.admission import AdmissionControl
from inflight.server.access.keys import Caller, Keys
from inflight.server.api_workers.asking import Asking
from inflight.server.api_workers.wire import (
    Ask,
    AskReply,
    FromFront,
    FrontHeartbeat,
    Leave,
    Opened,
    Question,
    StartFront,
)
from inflight.server.observability.metrics import MetricCounts

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.server.api_workers.worker")

Answerer = Callable[["FrontProcess", Question], Awaitable[object]]


class FrontProcess:
    """What it is asked for goes to `answer`; what it has begun ends with it."""

    def __init__(
        self, start: StartFront, log_format: str, keys: Keys, admission: AdmissionControl, answer: Answerer
    ) -> None:
        self.number = start.number
        self.launch = start.launch
        self.start = start
        self.is_greeted = False  # it has its first message
        self.is_open = False  # it takes requests
        self.counts: MetricCounts | None = None  # as last heard
        host = ChildHost(name="front process", command=COMMAND, descriptors=(start.listener,))
        self.process: ConnectedProcess[FromFront] = ConnectedProcess(host, FromFront, log_format)
        self.asking = Asking(self.send, lambda question: answer(self, question))
        self._keys = keys
        self._admission = admission
        self._service: ClientService | None = None
        self._entered: Counter[tuple[str, str | None]] = Counter()  # callers and request ids

    @property
    def num_running(self) -> int:
        """Requests that it has begun and not ended."""
        return self._entered.total()

    @property
    def num_answered(self) -> int:
        """Of these, requests to the engine."""
        return sum(times for (_, request_id), times in self._entered.items() if request_id is not None)

    def has_running(self, name: str, request_id: str) -> bool:
        return (name, request_id) in self._entered

    def send(self, message: Message) -> None:
        self.process.send(message)

    def serve(self, client: EngineClient, stats: Callable[[], EngineStats]) -> None:
        """The engine is there: let the front open."""
        self._service = ClientService(client, self.send, stats)
        self.send(Ready(client.facts, stats()))

    def send_stats(self) -> None:
        """The engine's statistics have changed."""
        if self._service is not None:
            self._service.send_stats()

    def handle(self, message: FromFront) -> None:
        match message:
            case Add() | Abort() | Describe() | RunCommand() | Ack() | Watch():
                assert self._service is not None
                self._service.handle(message)
            case Ask() | AskReply():
                self.asking.handle(message)
            case Leave(caller, request_id):
                self._leave(caller, request_id)
            case FrontHeartbeat(counts):
                self.counts = counts or self.counts
            case Opened():
                self.is_open = True

    async def enter(self, name: str, request_id: str | None) -> None:
        """Raises ApiError where a limit is reached, over all front processes."""
        await self._admission.enter(self._caller(name), request_id)
        self._entered[name, request_id] += 1

    def _leave(self, name: str, request_id: str | None) -> None:
        if self._entered[name, request_id]:
            self._entered[name, request_id] -= 1
            self._admission.leave(self._caller(name), request_id)
            if not self._entered[name, request_id]:
                del self._entered[name, request_id]

    def _caller(self, name: str) -> Caller:
        return self._keys.named(name)

    async def close(self) -> None:
        """The process is gone: end what it had in the engine, and count it no more."""
        self.asking.close()
        for (name, request_id), times in list(self._entered.items()):
            for _ in range(times):
                self._leave(name, request_id)
        if self._service is not None:
            await self._service.close()
