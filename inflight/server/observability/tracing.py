"""Optional OpenTelemetry spans, one per request to the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from inflight.errors import ConfigError
from inflight.server.observability.request_log import LoggedRequest


class Tracer(Protocol):
    """Where finished requests are traced."""

    def record(
        self, logged: LoggedRequest, model: str, headers: Mapping[str, str], error: str | None
    ) -> None:
        """Trace a finished request from its records."""

    def close(self) -> None: ...


class NoTracer:
    """Traces nothing."""

    def record(
        self, logged: LoggedRequest, model: str, headers: Mapping[str, str], error: str | None
    ) -> None:
        pass

    def close(self) -> None:
        pass


class OtelTracer:
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

        def at(moment: float) -> int:
            return now - int((ended - moment) * 1e9)

        span = self._tracer.start_span(
            logged.task,
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=at(logged.started_at),
            attributes=_attributes(logged, model),
        )
        if logged.first_token_at is not None:
            span.add_event("first token", timestamp=at(logged.first_token_at))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=now)

    def close(self) -> None:
        self._provider.shutdown()


def tracer_of(endpoint: str | None) -> Tracer:
    """Return a tracer that sends spans to the endpoint, or none if that is None."""
    return NoTracer() if endpoint is None else OtelTracer(endpoint)


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
        "gen_ai.usage.output_tokens": sum(record.num_output_tokens for record in records),
        "gen_ai.usage.cached_tokens": sum(record.num_cached_tokens for record in records),
        "inflight.num_preemptions": sum(record.num_preemptions for record in records),
    }
    if records:
        attributes["gen_ai.usage.input_tokens"] = logged.num_pooled_tokens or records[0].num_prompt_tokens
        if records[0].admitted_at is not None:
            attributes["gen_ai.latency.time_in_queue"] = records[0].admitted_at - records[0].arrived_at
    if logged.first_token_at is not None:
        attributes["gen_ai.latency.time_to_first_token"] = logged.first_token_at - logged.started_at
    return attributes
