"""Bad input, limits, cancelling and counting, for requests of many texts."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inflight.server.observability.request_log import OtelTracer
from tests.server.http.test_limits import connect
from tests.server.live import Live, live_server
from tests.server.pooled import EMBEDDER, TOKENIZER, PooledBackend

MANY = ["a text"] * 300


@pytest.fixture(scope="module")
def backend() -> Iterator[PooledBackend]:
    backend = PooledBackend(EMBEDDER, max_queue=4)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(backend: PooledBackend) -> Iterator[Live]:
    with live_server(backend) as live:
        yield live
        live.wait_until_idle()


def refused(live: Live, path: str, body: Any, **options: Any) -> tuple[int, str | None, str | None]:
    response = live.post(path, body, **options)
    error = response.json()["error"]
    assert error["message"]
    return response.status_code, error["code"], error["param"]


# ---- bad input ----

INVALID = (400, "invalid_value")
EMBED, RERANK, SCORE = "/v1/embeddings", "/v2/rerank", "/score"
BAD = [
    (EMBED, {}, (400, "missing_parameter", "input")),
    (EMBED, {"input": []}, (*INVALID, "input")),
    (EMBED, {"input": [[]]}, (400, None, "input")),
    (EMBED, {"input": None}, (*INVALID, "input")),
    (EMBED, {"input": 5}, (*INVALID, "input")),
    (EMBED, {"input": {"text": "a"}}, (*INVALID, "input")),
    (EMBED, {"input": ["a", None]}, (*INVALID, "input")),
    (EMBED, {"input": ["a", 5]}, (*INVALID, "input")),
    (EMBED, {"input": [5, [6]]}, (*INVALID, "input")),
    (EMBED, {"input": [True]}, (400, None, "input")),
    (EMBED, {"input": [1.5]}, (400, None, "input")),
    (EMBED, {"input": [[1, "a"]]}, (400, None, "input")),
    (EMBED, {"input": [-1]}, (400, None, "input")),
    (EMBED, {"input": [TOKENIZER.vocab_size]}, (400, None, "input")),
    (EMBED, {"input": [2**70]}, (400, None, "input")),
    (EMBED, {"input": "a", "dimensions": 5}, (400, None, "dimensions")),
    (EMBED, {"input": "a", "dimensions": 0}, (400, None, "dimensions")),
    (EMBED, {"input": "a", "dimensions": True}, (*INVALID, "dimensions")),
    (EMBED, {"input": "a", "dimensions": 4.5}, (*INVALID, "dimensions")),
    (EMBED, {"input": "a", "encoding_format": "int8"}, (*INVALID, "encoding_format")),
    (EMBED, {"input": "a", "prompt_name": "other"}, (400, None, "prompt_name")),
    (EMBED, {"input": "a", "truncate": "yes"}, (*INVALID, "truncate")),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 0}, (400, None, "truncate_prompt_tokens")),
    (EMBED, {"input": "a", "priority": 2**40}, (400, None, "priority")),
    (EMBED, {"input": "a", "other": 1}, (400, "unknown_parameter", "other")),
    (EMBED, {"input": "a", "model": "other"}, (404, "model_not_found", "model")),
    (RERANK, {"query": "a"}, (400, "missing_parameter", "documents")),
    (RERANK, {"documents": ["a"]}, (400, "missing_parameter", "query")),
    (RERANK, {"query": 5, "documents": ["a"]}, (*INVALID, "query")),
    (RERANK, {"query": "a", "documents": []}, (*INVALID, "documents")),
    (RERANK, {"query": "a", "documents": "b"}, (*INVALID, "documents")),
    (RERANK, {"query": "a", "documents": ["b", 5]}, (*INVALID, "documents")),
    (RERANK, {"query": "a", "documents": [{"title": "b"}]}, (*INVALID, "documents")),
    (RERANK, {"query": "a", "documents": [{"text": 5}]}, (*INVALID, "documents")),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, (400, None, "top_n")),
    (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, (400, None, "max_tokens_per_doc")),
    (RERANK, {"query": "a", "documents": ["b"], "scale": "percent"}, (*INVALID, "scale")),
    (RERANK, {"query": "a", "documents": ["b"], "instruction": "c"}, (400, None, "instruction")),
    (
        *(RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["title"]}),
        (400, "unsupported_parameter", "rank_fields"),
    ),
    (SCORE, {"text_1": "a"}, (*INVALID, None)),
    (SCORE, {"text_1": "a", "documents": ["b"]}, (*INVALID, None)),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, (400, None, "text_1")),
    (SCORE, {"queries": ["a", "b"], "documents": ["c"]}, (400, None, "queries")),
    (SCORE, {"text_1": "a", "text_2": [5]}, (*INVALID, "text_2")),
]


@pytest.mark.parametrize(("path", "body", "expected"), BAD)
def test_bad_input_is_rejected_before_the_engine_sees_it(
    server: Live, backend: PooledBackend, path: str, body: Any, expected: tuple[Any, ...]
) -> None:
    num_steps = backend.runner.num_steps
    assert refused(server, path, body) == expected
    assert backend.runner.num_steps == num_steps


def test_nan_is_rejected(server: Live) -> None:
    headers = {"content-type": "application/json"}
    for value in ("NaN", "Infinity", "[NaN]", '["a", NaN]'):
        content = f'{{"input": {value}}}'
        response = server.http.post(EMBED, content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) in [(400, "input"), (400, None)]


def test_million_documents_are_rejected_before_they_are_processed(
    server: Live, backend: PooledBackend
) -> None:
    num_steps = backend.runner.num_steps
    content = json.dumps({"query": "a", "documents": ["b"] * 10**6}).encode()
    headers = {"content-type": "application/json"}
    response = server.http.post(RERANK, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "too_many_documents"
    assert "at most 2048" in response.json()["error"]["message"]
    assert backend.runner.num_steps == num_steps


def test_max_documents_limits_each_request(backend: PooledBackend) -> None:
    with live_server(backend, max_documents=2) as live:
        assert live.post(EMBED, {"input": ["a", "b"]}).status_code == 200
        assert live.post(EMBED, {"input": [5, 6, 7]}).status_code == 200  # one text
        too_many = (400, "too_many_documents")
        assert refused(live, EMBED, {"input": ["a", "b", "c"]}) == (*too_many, "input")
        assert refused(live, SCORE, {"text_1": ["a"] * 3, "text_2": "b"}) == (*too_many, "text_1")
        assert refused(live, RERANK, {"query": "a", "documents": ["b"] * 3}) == (*too_many, "documents")


# ---- many texts, and others beside them ----


def test_many_documents_pass_through_a_short_queue(server: Live) -> None:
    response = server.post(EMBED, {"input": MANY, "encoding_format": "base64"})
    assert response.status_code == 200
    assert len({item["embedding"] for item in response.json()["data"]}) == 1
    assert [item["index"] for item in response.json()["data"]] == list(range(len(MANY)))


def test_full_queue_rejects_with_retry_after(server: Live, backend: PooledBackend) -> None:
    with backend.held_steps() as held, later(server, EMBED, {"input": MANY}) as first:
        server.wait_until("a full queue", lambda: _is_full(server))
        response = server.post(EMBED, {"input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        held.release()
        assert first().status_code == 200


async def _is_full(live: Live) -> bool:
    return (await live.backend.engine.stats()).num_waiting >= 4


@contextlib.contextmanager
def later(live: Live, path: str, body: Any) -> Iterator[Any]:
    """Send it from a thread; what is yielded waits for the answer."""
    responses: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: responses.append(httpx.post(live.url + path, json=body, timeout=60))
    )
    thread.start()

    def wait() -> httpx.Response:
        thread.join(60)
        return responses[0]

    yield wait
    thread.join(60)


def test_disconnected_client_frees_all_texts(server: Live, backend: PooledBackend) -> None:
    num_before = server.state.metrics.num_disconnects
    num_texts = server.state.metrics.num_texts["embed"]
    with backend.held_steps():
        with connect(server) as connection:
            content = json.dumps({"input": MANY}).encode()
            head = f"POST {EMBED} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            server.wait_until("a full queue", lambda: _is_full(server))
        server.wait_until("its end", lambda: server.state.metrics.num_disconnects > num_before)
    server.wait_until_idle()
    assert server.state.metrics.num_texts["embed"] - num_texts < len(MANY) // 2


def test_request_can_be_cancelled_by_id(server: Live, backend: PooledBackend) -> None:
    with backend.held_steps(), later(server, EMBED, {"input": MANY, "request_id": "mine"}) as answer:
        server.wait_until("a full queue", lambda: _is_full(server))
        assert refused(server, EMBED, {"input": "a", "request_id": "mine"})[1] == "request_id_in_use"
        report = server.http.get("/v1/requests/mine").json()
        assert (report["task"], report["num_answers"], report["route"]) == ("embed", len(MANY), EMBED)
        assert len(report["answers"]) <= 16
        cancelled = server.http.delete("/v1/requests/mine").json()
        assert cancelled["cancelled"] is True
        response = answer()
        assert (response.status_code, response.json()["error"]["code"]) == (409, "cancelled")
    server.wait_until_idle()
    assert server.http.get("/v1/requests/mine").json()["status"] == "cancelled"


def test_first_token_timeout_applies_to_the_first_result(backend: PooledBackend) -> None:
    with live_server(backend, first_token_timeout=0.05) as live, backend.held_steps():
        response = live.post(EMBED, {"input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "first_token_timeout")
        assert "no result was computed" in response.json()["error"]["message"]


# ---- reports, metrics and spans ----


def test_request_report_explains_the_time(server: Live) -> None:
    server.post(EMBED, {"input": ["a text", "another"], "request_id": "slow"})
    report = server.http.get("/v1/requests/slow").json()
    assert report["status"] == "finished"
    assert [answer["finish_reason"] for answer in report["answers"]] == ["stop", "stop"]
    assert report["answers"][0]["num_prompt_tokens"] == len(TOKENIZER.encode("a text"))
    assert report["answers"][0]["prefill_seconds"] is not None
    assert "for the prompt" in report["why"]


def test_metrics_count_texts_and_tokens(server: Live) -> None:
    def total(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(name) and 'task="rerank"' in line
        )

    names = [f"inflight:{name}_total" for name in ("requests", "pooled_texts", "pooled_tokens")]
    before = [total(name) for name in names]
    answer = server.post(RERANK, {"query": "a", "documents": ["b", "c"]}).json()
    after = [total(name) for name in names]
    num_tokens = answer["usage"]["total_tokens"]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 3, num_tokens]


def test_span_is_recorded(backend: PooledBackend) -> None:
    exporter = InMemorySpanExporter()
    with live_server(backend, tracer=OtelTracer("", exporter)) as live:
        answer = live.post(EMBED, {"input": ["a text"] * 20, "request_id": "traced"}).json()
        live.post(EMBED, {"input": [TOKENIZER.vocab_size]})
    good, bad = exporter.get_finished_spans()
    assert good.attributes is not None
    assert good.name == "embed"
    assert good.attributes["gen_ai.operation.name"] == "embeddings"
    assert good.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["total_tokens"]
    assert good.attributes["inflight.num_answers"] == 20
    assert not bad.status.is_ok


def test_keys_count_usage_and_limit_requests(backend: PooledBackend, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: alice, key: secret, requests_per_minute: 2}]")
    with live_server(backend, keys=str(file)) as live:
        assert refused(live, EMBED, {"input": "a"})[:2] == (401, "missing_api_key")
        live.http.headers["authorization"] = "Bearer secret"
        num_tokens = 0
        for texts in (["a text"] * 10, "a"):
            num_tokens += live.post(EMBED, {"input": texts}).json()["usage"]["total_tokens"]
        usage = live.state.keys.callers[0].usage
        assert (usage.num_requests, usage.num_prompt_tokens) == (2, num_tokens)
        response = live.post(EMBED, {"input": "a"})
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert "retry-after" in response.headers
