"""Log lines and OpenTelemetry spans."""

from __future__ import annotations

import logging
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inflight.errors import ConfigError
from inflight.server.observability.request_log import OtelTracer
from tests.server.live import Backend, live_server


def test_no_prompt_and_no_key_in_the_log(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="inflight")
    with live_server(backend, api_key=("key-of-someone",)) as live:
        headers = {"authorization": "Bearer key-of-someone"}
        body = {"prompt": "a very private prompt", "max_tokens": 2, "request_id": "named"}
        live.post("/v1/completions", body, headers=headers)
        live.post("/v1/completions", body, headers={"authorization": "Bearer wrong-key"})
    text = caplog.text + str([vars(entry) for entry in caplog.records])
    assert "private" not in text
    assert "key-of-someone" not in text
    assert "wrong-key" not in text
    ids = [entry.request_id for entry in caplog.records if entry.name == "inflight.access"]  # type: ignore[attr-defined]
    assert ids[0] == "named"
    assert ids[1].startswith("req-")


def test_request_has_a_span_with_its_usage(backend: Backend) -> None:
    exporter = InMemorySpanExporter()
    with live_server(backend, tracer=OtelTracer("", exporter)) as live:
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "request_id": "traced"}
        live.post("/v1/completions", body, headers=headers)
        live.post("/v1/completions", {"prompt": [5] * 5000})
        live.post("/v1/responses", {"input": "x", "max_output_tokens": 1})
    good, bad, response = exporter.get_finished_spans()
    names = [(span.attributes or {})["gen_ai.operation.name"] for span in (good, response)]
    assert names == ["text_completion", "chat"]
    assert good.attributes is not None
    assert good.attributes["gen_ai.request.id"] == "traced"
    assert good.attributes["gen_ai.usage.input_tokens"] == 2
    assert good.attributes["gen_ai.usage.output_tokens"] == 3
    assert f"{good.context.trace_id:032x}" == trace
    assert [event.name for event in good.events] == ["first token"]
    assert good.start_time is not None
    assert good.start_time <= good.events[0].timestamp <= (good.end_time or 0)
    assert not bad.status.is_ok


def test_tracing_without_opentelemetry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'inflight-llm\[otel\]'"):
        OtelTracer("http://localhost:4318")
