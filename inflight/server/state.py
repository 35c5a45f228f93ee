"""The served model, and the state that all routes share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from inflight import __version__
from inflight.engine.client import EngineClient, ModelFacts
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.errors import shown
from inflight.frontend.frontend import Frontend
from inflight.frontend.scoring import unsupported_task
from inflight.processes.fair_threads import FairThreads
from inflight.router.replicas import Replicas
from inflight.router.router import Router
from inflight.scoring import Task, tasks_of
from inflight.server.access.keys import AdmissionControl, Caller, Keys, LocalAdmission, Turns
from inflight.server.access.middleware import Hosts
from inflight.server.config import ServerConfig
from inflight.server.errors import ApiError
from inflight.server.http.bodies import UnsentBytes
from inflight.server.observability.metrics import MetricCounts, Metrics
from inflight.server.observability.request_log import RequestLog, RequestSource, Tracer
from inflight.server.openai.responses.store import Responses, ResponseStore
from inflight.timeline.stream import ChunkConverter

T = TypeVar("T")

TEXT_THREADS = 4  # tokenize and render beside the event loop
SERVICE_THREADS = 2  # do so for /tokenize and /detokenize, so that no chat waits for them


class ServedModel:
    """A model that is served, with everything that requests to it need."""

    def __init__(self, engine: AsyncEngine, options: ServerConfig, serials: Iterator[object]) -> None:
        self.engine = engine
        self.options = options
        self.client: EngineClient = engine.client
        self.frontend: Frontend = engine.frontend
        self.names = options.served_model_name or (default_name(options.model),)
        self.replicas: Replicas | None = self.client.replicas if isinstance(self.client, Router) else None
        facts = self.client.facts
        self.tasks = tasks_of(facts.generates, facts.pooling)
        self.fingerprint = _fingerprint(facts, options)
        self.pooling_size = 0 if facts.pooling is None else facts.pooling.size  # numbers in a text's result
        self._serials = serials

    @property
    def label(self) -> str:
        """The model's name in metrics, and in answers to requests that name none."""
        return self.names[0]

    @property
    def max_waiting(self) -> int:
        """The number of waiting requests at which more are refused."""
        num_queues = 1 if self.replicas is None else max(1, len(self.replicas.available))
        return num_queues * self.options.max_queue

    def answers_to(self, name: str) -> bool:
        """Return whether clients may use this name: one that it was given or, without any, its path."""
        path = None if self.options.served_model_name else self.options.model
        return name in self.names or (path is not None and name.rstrip("/") == path.rstrip("/"))

    def next_id(self, prefix: str) -> str:
        """Return a request id for the engine that no other request has."""
        return f"{prefix}{next(self._serials)}"


@dataclass(eq=False)
class ServerState:
    """The state that all routes share."""

    engine: InitVar[AsyncEngine]
    options: ServerConfig
    keys: Keys
    hosts: Hosts = field(default_factory=Hosts)
    tracer: Tracer = field(default_factory=Tracer)
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    # The numbers in engine request ids. Processes that share an engine must not use the same ones.
    serials: InitVar[Iterator[object] | None] = None
    admission: AdmissionControl = field(default_factory=LocalAdmission)
    stored: InitVar[Responses | None] = None  # None: they are stored in this process
    counts_of_others: Callable[[], Awaitable[list[MetricCounts]]] | None = None  # from other API workers
    num_answered_by_others: Callable[[], int] = lambda: 0  # requests that other API workers answer now
    requests_of_workers: RequestSource | None = None  # those of all API workers, in the main process

    def __post_init__(
        self, engine: AsyncEngine, serials: Iterator[object] | None, stored: Responses | None
    ) -> None:
        options = self.options
        self.model = ServedModel(engine, options, serials or count())
        self.metrics = Metrics(
            self.model.label, options.metrics_compat, _cache_labels(engine.client.facts, options)
        )
        self.keys.set_admin(options.admin_key)
        # Readers of the timeline by key; None: readers who see everyone's requests.
        self.viewers: Counter[str | None] = Counter()
        self.tracing: set[str | None] = set()
        self.converters: WeakValueDictionary[str | None, ChunkConverter] = WeakValueDictionary()
        # Times of the engines' clock plus this are seconds since 1970.
        self.to_unix = time.time() - time.monotonic()
        self.unsent = UnsentBytes(options.max_unsent_bytes)
        self.request_log = RequestLog(options.request_history)
        self.report_turns = Turns()  # to read reports and lists of requests, one at a time
        self.exposing = asyncio.Lock()  # metrics: one at a time
        limits = options.max_stored_responses, options.max_stored_bytes
        self.responses: Responses = stored or ResponseStore(*limits)
        # With several keys, none of them takes the last thread from the others.
        max_per_key = TEXT_THREADS - (len(self.keys.callers) > 1)
        self.threads = FairThreads("inflight-text", TEXT_THREADS, max_per_key)
        self.service_threads = ThreadPoolExecutor(SERVICE_THREADS, "inflight-service")

    def find_model(self, name: str | None, task: Task | None = None) -> tuple[ServedModel, str]:
        """Return the model of that name, and the name to answer with. Every route with a `model` asks here.

        Raises ApiError 404 if it is not served, and RequestError if it cannot do the task.
        """
        model = self.model
        if name is not None and not model.answers_to(name):
            message = (
                f"the model {shown(name, 200)} is not served here: available are {', '.join(model.names)}"
            )
            raise ApiError(404, message, code="model_not_found", param="model")
        if task is not None and task not in model.tasks:
            raise unsupported_task(task, model.frontend.pooling, model.frontend.generates)
        return model, name or model.label

    async def in_thread_if(self, is_long: bool, caller: Caller, work: Callable[[], T]) -> T:
        """Return the result of `work`, done in a thread if it takes long, so that other requests go on meanwhile."""
        return await self.in_thread(caller, work) if is_long else work()

    async def in_thread(self, caller: Caller, work: Callable[[], T]) -> T:
        """Return the result of `work`, done in a thread. Keys take turns."""
        return await asyncio.wrap_future(self.threads.submit(caller.name, work))

    async def in_service_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work` for /tokenize and the like, which never take a thread from generation."""
        return await asyncio.get_running_loop().run_in_executor(self.service_threads, work)

    def close(self) -> None:
        self.threads.close()
        self.service_threads.shutdown(wait=False, cancel_futures=True)
        self.tracer.close()


def _cache_labels(facts: ModelFacts, options: ServerConfig) -> dict[str, object]:
    """Return the labels of vLLM's cache metric, by which dashboards join."""
    cache = options.engine.cache
    return {
        "block_size": facts.block_size,
        "num_gpu_blocks": facts.num_blocks,
        "cache_dtype": facts.dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
    }


def _fingerprint(facts: ModelFacts, options: ServerConfig) -> str:
    """Return a fingerprint that is the same wherever the same seed gives the same tokens."""
    known = f"{__version__}/{facts.model}/{facts.fingerprint}/{facts.dtype}/{facts.device}"
    cache = options.engine.cache
    if cache.kv_cache_dtype != "auto":
        known += f"/{cache.kv_cache_dtype}/{sorted(cache.kv_cache_dtype_skip_layers)}"
    return f"fp_{sha256(known.encode()).hexdigest()[:10]}"


def default_name(model: str | None) -> str:
    """Return the name of a model that was given none. It is never a folder's path."""
    if model is None:
        return "inflight-builtin"
    return Path(model).absolute().name if Path(model).exists() else model


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def caller_of(request: Request) -> Caller:
    """Return the caller, which `AccessMiddleware` sets for every request."""
    caller: Caller = request.scope["inflight.caller"]
    return caller
