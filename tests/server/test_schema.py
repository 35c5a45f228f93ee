"""Valid and invalid bodies generated from the OpenAPI document get only the statuses and shapes that it declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from inflight.scoring import PoolingFacts
from inflight.server.openai.schemas import ChatChunk, Completion
from tests.server.live import Backend, Live, live_server, stream
from tests.server.pooled import CLASSIFIER, EMBEDDER, PooledBackend

CONVERSING = ("/v1/responses", "/v1/messages")
GENERATING = ("/v1/completions", "/v1/chat/completions", *CONVERSING)
SCORING = ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/v1/embeddings")
CLASSIFYING = ("/classify", "/v1/classify")
FEW = ("/rerank", "/v1/rerank", "/v1/score", "/v1/classify")  # the same as another
RESPONSE = "/v1/responses/{response_id}"
ADMIN_READS = ("/server_info", "/is_sleeping")
ADMIN_COMMANDS = ("/reset_prefix_cache", "/sleep", "/wake_up")
ADMIN_CHANGES = (  # the server has no admin key
    *ADMIN_COMMANDS,
    *("/v1/replicas", "/v1/replicas/roll", "/v1/replicas/{replica}/drain", "/v1/replicas/{replica}/restart"),
)
OPERATIONS = [
    *(("POST", path, 12) for path in GENERATING),
    *(("POST", path, 4 if path in FEW else 10) for path in (*SCORING, *CLASSIFYING)),
    *(
        ("POST", path, 8)
        for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
    ),
    *(("GET", path, 8) for path in ("/v1/models/{model}", "/v1/requests/{request_id}", RESPONSE)),
    ("GET", f"{RESPONSE}/input_items", 8),
    *(("DELETE", path, 8) for path in ("/v1/requests/{request_id}", RESPONSE)),
    ("POST", f"{RESPONSE}/cancel", 8),
    *(("GET", path, 2) for path in ("/v1/models", "/health", "/ready", "/version", "/metrics", "/")),
    *(("GET", path, 2) for path in ("/load", "/ping", *ADMIN_READS)),
    ("GET", "/v1/replicas", 2),
    *(("GET", path, 2) for path in ("/v1/requests", "/v1/memory", "/v1/trace")),
    *(("POST", path, 2) for path in ADMIN_CHANGES),
    ("DELETE", "/v1/replicas/{replica}", 2),
]
# A valid body for each path, since the generated ones may all be rejected.
TEXTS = {"input": ["one", "another"]}
PAIRS = {"query": "one", "documents": ["one", "another"]}
SCORES = {"text_1": "one", "text_2": ["one", "another"]}
ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 4, "logprobs": 2, "n": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/responses": {"input": "Hello.", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Hello."},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello."}]},
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), PAIRS),
    **dict.fromkeys(("/score", "/v1/score"), SCORES),
    **dict.fromkeys(("/v1/embeddings", *CLASSIFYING), TEXTS),
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5, 6]},
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def server(backend: Backend) -> Iterator[Live]:
    with live_server(backend) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def scorer() -> Iterator[Live]:
    yield from pooling_server(EMBEDDER)


@pytest.fixture(scope="module")
def classifier() -> Iterator[Live]:
    yield from pooling_server(CLASSIFIER)


def pooling_server(facts: PoolingFacts) -> Iterator[Live]:
    backend = PooledBackend(facts)
    with live_server(backend) as live:
        yield live
        live.wait_until_idle()
    backend.close()


@pytest.fixture(scope="module")
def document(server: Live) -> Any:
    return schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())


def test_every_operation_is_tested(document: Any) -> None:
    operations = {(result.ok().method.upper(), result.ok().path) for result in document.get_all_operations()}
    tested = {(method, path) for method, path, _ in OPERATIONS}
    assert operations == {*tested, ("GET", "/v1/steps")}, "which never ends: routes/test_timeline.py reads it"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path", "max_examples"), OPERATIONS)
def test_responses_conform_to_the_document(
    method: str, path: str, max_examples: int, mode: GenerationMode, document: Any, request: Any
) -> None:
    fixture = "scorer" if path in SCORING else "classifier" if path in CLASSIFYING else "server"
    server: Live = request.getfixturevalue(fixture)
    operation = document[path][method]
    if mode.is_negative and not operation.body:
        return  # there is nothing to invalidate
    if mode.is_positive and "{" not in path:
        case = operation.Case(body=ANSWERED[path]) if operation.body else operation.Case()
        response = case.call(base_url=server.url, timeout=60)
        refused = (method == "POST" and path in ADMIN_CHANGES) or path in ADMIN_READS
        assert response.status_code == (403 if refused else 200), response.text
        case.validate_response(response, checks=CHECKS)

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if path in GENERATING and mode.is_positive:
            make_answerable(path, case.body)
        elif fixture != "server" and mode.is_positive:
            make_fit(case.body)
        response = case.call(base_url=server.url, timeout=60)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            # schemathesis leaves long streams before their end, which the server may not have seen yet
            events = stream(server, path, {**case.body, "request_id": None})
            for event in events:
                (Completion if path == GENERATING[0] else ChatChunk).model_validate(event, strict=True)
        else:
            case.validate_response(response, checks=CHECKS)

    check()


def make_fit(body: dict[str, Any]) -> None:
    """Remove fields that the model may not support."""
    for name in ("model", "dimensions", "prompt_name", "scale", "instruction", "priority"):
        body.pop(name, None)


def make_answerable(path: str, body: dict[str, Any]) -> None:
    """Make a body short to answer and valid for the served model, and give every message a content."""
    body.pop("model", None)
    for message in body.get("messages", ()):
        message["content"] = message.get("content") or "Hello."
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name):
            body[name] = min(body[name], 4)
    body.setdefault("max_output_tokens" if path == "/v1/responses" else "max_tokens", 4)
    if path in CONVERSING:  # their events have their own tests
        body.pop("stream", None)
    if body.get("n"):
        body["n"] = min(body["n"], 2)
