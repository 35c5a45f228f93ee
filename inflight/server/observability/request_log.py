"""Records of requests: the running and recently finished ones, when a queue slot becomes free, and optional spans."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Reversible, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from inflight.errors import ConfigError, shown
from inflight.events import RequestRecord
from inflight.frontend.generation import Generation
from inflight.scoring import Task
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.formatters import ResponseFormatter

MAX_SECONDS = 600  # the longest estimate
_WEIGHT = 0.2  # of the latest interval between two ends in the moving average
MAX_TEXT_RECORDS = 16  # texts of one request whose records are kept: there may be thousands
Outcome = Literal["finished", "failed", "cancelled"]
# Why a request is ended early.
Reason = Literal["first_token", "request", "disconnect", "cancelled", "shutdown"]
RequestKey = tuple[str, str]  # the caller's name and the request id, as the client sees it
Selection = Literal["waiting", "running", "finished"]  # what a list of requests can be restricted to


@dataclass(eq=False)
class LoggedRequest:
    """One request: what was requested, and its outcome."""

    request_id: str  # as the client sees it
    caller: Caller
    route: str
    stream: bool
    priority: int
    tenant: str
    interrupt: Callable[[Reason], None]
    task: Task = "generate"
    created: int = field(default_factory=lambda: int(time.time()))
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    ended_at: float | None = None
    client_seconds: float = 0.0  # spent waiting for the client to read
    outcome: Outcome | None = None
    generation: Generation | None = None  # while it runs
    formatter: ResponseFormatter | None = None  # of a generation, while it runs
    # While it runs: ends it and returns the number of freed blocks.
    abort: Callable[[], Awaitable[int]] | None = None
    queued: bool = False  # accepted by the engine
    num_answers: int = 0  # or texts; each has its own id in the engine
    engine_ids: list[str] = field(default_factory=list)  # of all answers, or of the first texts
    num_prompt_tokens: int = 0  # of all answers, or of the texts that have ended
    # Of all answers or texts that have ended, and of answers that were cut short:
    num_ended_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    slowest: RequestRecord | None = None
    _records: dict[str, RequestRecord] = field(default_factory=dict)  # until it ends
    _packed: bytes | None = None  # the records from then on
    _first_without_record: str | None = None  # from then on

    @property
    def key(self) -> RequestKey:
        return self.caller.name, self.request_id

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens that all answers have by now."""
        answers = () if self.generation is None else self.generation.answers
        running = [answer.output for answer in answers if answer.request.request_id not in self._records]
        return self.num_ended_tokens + sum(len(output.token_ids) for output in running)

    @property
    def records(self) -> dict[str, RequestRecord]:
        """The records of answers and of the first texts that have ended, by the engine's ids."""
        return self._records if self._packed is None else _UNPACK(self._packed)

    @property
    def first_without_record(self) -> str | None:
        """The engine's id of the first answer that has not ended, or of which nothing is recorded."""
        if self._packed is not None:
            return self._first_without_record
        return next((engine_id for engine_id in self.engine_ids if engine_id not in self._records), None)

    def pack(self) -> None:
        """Pack the records: there may be 100,000 in the log, which would make every garbage collection slow."""
        self._first_without_record = self.first_without_record
        self._packed, self._records = _PACK(self._records), {}

    def add_record(self, record: RequestRecord, is_kept: bool) -> None:
        """Add an answer or text that has ended to the totals, and keep its record if so requested."""
        if is_kept:
            self._records[record.request_id] = record
        self.num_ended_tokens += record.num_output_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_preemptions += record.num_preemptions
        if self.slowest is None or record.breakdown.total > self.slowest.breakdown.total:
            self.slowest = record


_PACK = msgspec.msgpack.Encoder().encode
_UNPACK = msgspec.msgpack.Decoder(dict[str, RequestRecord]).decode


class QueuePace:
    """Estimates when a queue slot becomes free, which is when a running answer ends.

    There are two estimates: from the recent intervals between ends, and from the tokens that running answers may still
    generate. The smaller one is used.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._between_ends: float | None = None  # seconds, moving average; None before the first end
        self._last_end = clock()

    def resume(self) -> None:
        """Restart the clock after an idle time, which was not spent on any answer."""
        self._last_end = self._clock()

    def record_ends(self, num_answers: int) -> None:
        """Note that answers have left the engine."""
        now = self._clock()
        for _ in range(num_answers):
            seconds = (now - self._last_end) / num_answers
            if self._between_ends is None:
                self._between_ends = seconds
            self._between_ends += _WEIGHT * (seconds - self._between_ends)
        if num_answers:
            self._last_end = now

    def seconds_to_free_slot(self, running: Iterable[LoggedRequest]) -> int:
        now = self._clock()
        # If an end is overdue, the running answers take longer than earlier ones did.
        waited = now - self._last_end
        by_pace = math.inf if self._between_ends is None else max(self._between_ends, waited)
        predicted = min([by_pace, *(_seconds_left(logged, now) for logged in running)])
        seconds = predicted if predicted < math.inf else waited
        return math.ceil(min(max(round(seconds, 1), 1), MAX_SECONDS))


def _seconds_left(logged: LoggedRequest, now: float) -> float:
    """Return when the first answer of a request will reach its `max_tokens` at its current rate."""
    if logged.generation is None or logged.first_token_at is None:
        return math.inf
    seconds, seconds_left = now - logged.first_token_at, math.inf
    for answer in logged.generation.answers:
        num_tokens = len(answer.output.token_ids)
        if num_tokens > 1 and not answer.output.finished:
            seconds_left = min(
                seconds_left, seconds / (num_tokens - 1) * (answer.request.max_tokens - num_tokens)
            )
    return seconds_left


class RequestLog:
    """Requests by caller and id: the same id of two callers names two requests."""

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._requests: dict[RequestKey, LoggedRequest] = {}  # in the order in which they were opened
        self._running: dict[RequestKey, LoggedRequest] = {}
        self._finished: OrderedDict[RequestKey, LoggedRequest] = OrderedDict()  # in the order of their ends
        self._by_engine_id: dict[str, LoggedRequest] = {}
        self.pace = QueuePace()

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._running.values()))

    def open(self, logged: LoggedRequest) -> None:
        """Add a request that was admitted."""
        assert logged.key not in self._running
        if not self._running:
            self.pace.resume()
        if logged.key in self._finished:  # the id is used again
            self._forget(self._finished.pop(logged.key))
        self._requests[logged.key] = self._running[logged.key] = logged

    def _forget(self, logged: LoggedRequest) -> None:
        del self._requests[logged.key]
        for engine_id in logged.engine_ids:
            self._by_engine_id.pop(engine_id, None)

    def set_generation(self, logged: LoggedRequest, generation: Generation) -> None:
        logged.generation, logged.abort = generation, generation.abort
        logged.num_answers = len(generation.request_ids)
        logged.num_prompt_tokens = sum(answer.request.num_prompt_tokens for answer in generation.answers)
        self.set_engine_ids(logged, generation.request_ids)

    def set_engine_ids(self, logged: LoggedRequest, engine_ids: list[str]) -> None:
        """Note the engine's ids of a request that is about to be sent to it."""
        logged.engine_ids = engine_ids
        for engine_id in engine_ids:
            self._by_engine_id[engine_id] = logged

    def answer_ended(self, logged: LoggedRequest, record: RequestRecord) -> None:
        """Note that the engine has finished one of its answers or texts."""
        logged.add_record(record, record.request_id in self._by_engine_id)
        self.pace.record_ends(1)

    def close(self, logged: LoggedRequest, outcome: Outcome) -> None:
        if logged.queued:  # a refused request occupied no slot
            self.pace.record_ends(len(logged.engine_ids) - len(logged.records))
        logged.outcome = logged.outcome or outcome
        logged.num_ended_tokens = logged.num_output_tokens
        logged.generation = logged.formatter = logged.abort = None
        logged.ended_at = time.perf_counter()
        logged.pack()
        del self._running[logged.key]
        self._finished[logged.key] = logged
        if len(self._finished) > self._max_finished:
            _, oldest = self._finished.popitem(last=False)
            self._forget(oldest)

    def find_running(self, caller: Caller, request_id: str) -> LoggedRequest | None:
        """Return a caller's request if it is running."""
        return self._running.get((caller.name, request_id))

    def find(self, caller: Caller, request_id: str) -> LoggedRequest:
        """Return a caller's request; an administrator finds the latest one of any caller.

        Raises ApiError 404 for any other, whether it exists or not.
        """
        key: RequestKey | None = (caller.name, request_id)
        if caller.is_admin:
            key = next((key for key in reversed(self._requests) if key[1] == request_id), None)
        logged = None if key is None else self._requests.get(key)
        if logged is None:
            raise ApiError(404, f"request {shown(request_id, 200)} does not exist", code="request_not_found")
        return logged

    def keys(self) -> Reversible[RequestKey]:
        """Return the keys of all requests, in the order in which they were opened."""
        return self._requests.keys()

    def get(self, key: RequestKey) -> LoggedRequest | None:
        return self._requests.get(key)

    async def cancel(self, logged: LoggedRequest) -> int | None:
        """Cancel a request. Return the number of freed blocks, or None if it had already ended."""
        if logged.outcome is not None:
            return None
        logged.outcome = "cancelled"
        if logged.abort is None:  # it is still being prepared
            logged.interrupt("cancelled")
            return 0
        return await logged.abort()

    def ids_of(self, caller: Caller, engine_ids: tuple[str, ...]) -> list[str]:
        """Return the ids, as clients see them, of those requests among these that the caller may see."""
        found = filter(None, map(self._by_engine_id.get, engine_ids))
        names = [logged.request_id for logged in found if caller.is_admin or logged.caller is caller]
        return list(dict.fromkeys(names))

    def retry_after(self) -> int:
        """Return the estimated seconds until a queue slot is free."""
        return self.pace.seconds_to_free_slot(self._running.values())


# ---- lists ----


class RequestSource(Protocol):
    """The requests that a list is made of: those of this process, or those of all API workers."""

    def keys(self) -> Reversible[RequestKey]:
        """Return the keys of all requests, in the order in which they were admitted."""

    async def summaries(
        self, keys: Sequence[RequestKey], selection: Selection | None
    ) -> Sequence[bytes | None]:
        """Return the summaries of requests as JSON; None for those that are not selected or have been forgotten."""


def latest_first(keys: Reversible[RequestKey], caller: Caller) -> list[RequestKey]:
    """Return those of the keys that a caller sees, the latest first; an administrator sees those of all callers.

    Of requests with the same id only the latest is seen, which is the one that `RequestLog.find` returns.
    """
    seen: dict[str, RequestKey] = {}
    for key in reversed(keys):
        if caller.is_admin or key[0] == caller.name:
            seen.setdefault(key[1], key)
    return list(seen.values())


# ---- tracing ----


class Tracer:
    """Traces nothing."""

    def record(
        self, logged: LoggedRequest, model: str, headers: Mapping[str, str], error: str | None
    ) -> None:
        """Trace a finished request from its records."""

    def close(self) -> None:
        pass


class OtelTracer(Tracer):
    """Creates spans when requests end, from times that are recorded anyway."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise ConfigError(
                "otlp_traces_endpoint is set, but OpenTelemetry is not installed: "
                "run pip install 'inflight-llm[otel]', or do not set the option"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "inflight"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("inflight.server")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, logged: LoggedRequest, model: str, headers: Mapping[str, str], error: str | None
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now, ended = time.time_ns(), time.perf_counter()

        def unix_ns(moment: float) -> int:
            return now - int((ended - moment) * 1e9)

        span = self._tracer.start_span(
            logged.task,
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=unix_ns(logged.started_at),
            attributes=_attributes(logged, model),
        )
        if logged.first_token_at is not None:
            span.add_event("first token", timestamp=unix_ns(logged.first_token_at))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=now)

    def close(self) -> None:
        self._provider.shutdown()


def tracer_of(endpoint: str | None) -> Tracer:
    """Return a tracer that sends spans to the endpoint, or that traces nothing if there is none."""
    return Tracer() if endpoint is None else OtelTracer(endpoint)


def _operation(logged: LoggedRequest) -> str:
    if logged.task == "generate":
        return "text_completion" if logged.route == "/v1/completions" else "chat"
    return "embeddings" if logged.task == "embed" else logged.task


def _attributes(logged: LoggedRequest, model: str) -> dict[str, Any]:
    records = list(logged.records.values())
    attributes: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.request.id": logged.request_id,
        "gen_ai.operation.name": _operation(logged),
        "inflight.tenant": logged.tenant,
        "inflight.num_answers": logged.num_answers,
        "gen_ai.usage.output_tokens": logged.num_output_tokens,
        "gen_ai.usage.cached_tokens": logged.num_cached_tokens,
        "inflight.num_preemptions": logged.num_preemptions,
    }
    if records:
        num_tokens = records[0].num_prompt_tokens if logged.task == "generate" else logged.num_prompt_tokens
        attributes["gen_ai.usage.input_tokens"] = num_tokens
        if records[0].admitted_at is not None:
            attributes["gen_ai.latency.time_in_queue"] = records[0].admitted_at - records[0].arrived_at
    if logged.first_token_at is not None:
        attributes["gen_ai.latency.time_to_first_token"] = logged.first_token_at - logged.started_at
    return attributes
