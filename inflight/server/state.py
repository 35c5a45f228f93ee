"""What all routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request

from inflight import __version__
from inflight.engine import EngineClient, ModelFacts
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.frontend import Frontend
from inflight.frontend.pooling import cannot
from inflight.pooling import Task, tasks_of
from inflight.router import Replicas, Router
from inflight.server.access.admission import AdmissionControl, LocalAdmission
from inflight.server.access.keys import AdminKey, Caller, Keys
from inflight.server.access.middleware import Hosts
from inflight.server.config import ServerConfig
from inflight.server.errors import ApiError
from inflight.server.http.unsent import UnsentBytes
from inflight.server.observability.metrics import MetricCounts, Metrics
from inflight.server.observability.request_log import RequestLog
from inflight.server.observability.tracing import NoTracer, Tracer
from inflight.server.openai.responses.store import LocalResponses, Responses, ResponseStore

T = TypeVar("T")

TEXT_THREADS = 4  # that tokenize and render beside the event loop
SERVICE_THREADS = 2  # that do so for /tokenize and /detokenize: no chat waits for them


@dataclass(eq=False)
class ServerState:
    engine: AsyncEngine
    options: ServerConfig
    keys: Keys
    hosts: Hosts = field(default_factory=Hosts)
    tracer: Tracer = field(default_factory=NoTracer)
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    # What ids in the engine are made of. Those of several processes before one engine must differ.
    serials: Iterator[object] = field(default_factory=count)
    admission: AdmissionControl = field(default_factory=LocalAdmission)
    stored: Responses | None = None  # None: they are kept here
    counts_of_others: Callable[[], Awaitable[list[MetricCounts]]] | None = None  # of other processes
    num_answered_by_others: Callable[[], int] = lambda: 0  # requests, just now

    def __post_init__(self) -> None:
        self.client: EngineClient = self.engine.client
        self.frontend: Frontend = self.engine.frontend
        facts = self.client.facts
        self.tasks = tasks_of(facts.generates, facts.pooling)
        self.fingerprint = _fingerprint(facts)
        self.num_results = 0 if facts.pooling is None else facts.pooling.size  # numbers for a text
        self.names = self.options.served_model_name or (default_name(self.options.model),)
        self.metrics = Metrics(
            self.names[0], self.options.metrics_compat == "vllm", _cache_labels(facts, self.options)
        )
        # Where there are replicas: who they are.
        self.replicas: Replicas | None = self.client.replicas if isinstance(self.client, Router) else None
        self.admin_key = AdminKey(self.options.admin_key, self.keys)
        self.unsent = UnsentBytes(self.options.max_unsent_bytes)
        self.request_log = RequestLog(self.options.request_history)
        limits = self.options.max_stored_responses, self.options.max_stored_bytes
        self.responses: Responses = self.stored or LocalResponses(ResponseStore(*limits))
        self.threads = ThreadPoolExecutor(TEXT_THREADS, "inflight-text")
        self.service_threads = ThreadPoolExecutor(SERVICE_THREADS, "inflight-service")

    @property
    def max_waiting(self) -> int:
        """Requests that wait when no more are taken."""
        num_queues = 1 if self.replicas is None else max(1, len(self.replicas.available))
        return num_queues * self.options.max_queue

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if name is None or name in self.names or self._is_path(name):
            return name or self.names[0]
        raise ApiError(
            404,
            f"the model {name!r:.200} is not served here: there is {', '.join(self.names)}",
            code="model_not_found",
            param="model",
        )

    def _is_path(self, name: str) -> bool:
        """Whether it is the model as it was given at start, in place of a name that it has been given none of."""
        model = None if self.options.served_model_name else self.options.model
        return model is not None and name.rstrip("/") == model.rstrip("/")

    def check_task(self, task: Task) -> None:
        """Raises RequestError for what the model cannot do."""
        if task not in self.tasks:
            raise cannot(task, self.frontend.pooling, self.frontend.generates)

    async def in_thread_if(self, is_long: bool, work: Callable[[], T]) -> T:
        """What the work gives. What is long is done in a thread, so that other requests go on meanwhile."""
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def in_service_thread(self, work: Callable[[], T]) -> T:
        """What the work gives; of what asks only about texts, and so never takes a thread from answers."""
        return await asyncio.get_running_loop().run_in_executor(self.service_threads, work)

    def close(self) -> None:
        for threads in (self.threads, self.service_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self.tracer.close()


def _cache_labels(facts: ModelFacts, options: ServerConfig) -> dict[str, object]:
    """With vLLM's names, for dashboards that join by them."""
    cache = options.engine.cache
    return {
        "block_size": facts.block_size,
        "num_gpu_blocks": facts.num_blocks,
        "cache_dtype": facts.dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
    }


def _fingerprint(facts: ModelFacts) -> str:
    """The same where the same seed gives the same tokens."""
    known = f"{__version__}/{facts.model}/{facts.fingerprint}/{facts.dtype}/{facts.device}"
    return f"fp_{sha256(known.encode()).hexdigest()[:10]}"


def default_name(model: str | None) -> str:
    """What clients call a model that was given no name: never the path of a folder."""
    if model is None:
        return "inflight-builtin"
    return Path(model).absolute().name if Path(model).exists() else model


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def caller_of(request: Request) -> Caller:
    """Set by the gate, which no request passes without."""
    caller: Caller = request.scope["inflight.caller"]
    return caller
