"""A server below a root path, whose model is requested by its path, with --strict."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import Backend, Live, live_server

PROMPT = {"prompt": [5, 6], "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def strict(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("small")
    with live_server(backend, model=f"{folder}/", root_path="/llm/", strict=True) as live:
        yield live


@pytest.mark.parametrize("prefix", ["", "/llm"])  # a proxy that strips it, and one that does not
def test_paths_work_with_and_without_the_root_path(strict: Live, prefix: str) -> None:
    assert strict.http.get(f"{prefix}/health").status_code == 200
    assert strict.post(f"{prefix}/v1/completions", {**PROMPT, "max_tokens": 2}).status_code == 200
    assert strict.http.get(f"{prefix}/llm/health").status_code == (404 if prefix else 200)


def test_root_path_matches_whole_segments_only(strict: Live) -> None:
    assert strict.http.get("/llmhealth").status_code == 404
    assert strict.http.get("/llm").headers["content-type"].startswith("text/html")  # the chat page


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", PROMPT, "max_tokens"),
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/messages", {**CHAT, "model": "small0"}, "max_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
    ],
)
def test_strict_rejects_max_tokens_beyond_the_context(
    strict: Live, path: str, body: dict[str, object], name: str
) -> None:
    limit = strict.state.model.frontend.max_model_len
    response = strict.post(path, {**body, name: limit})
    assert response.status_code == 400
    assert f"{name} is {limit}: together they must be at most {limit}" in response.json()["error"]["message"]


def test_strict_accepts_what_fits(strict: Live) -> None:
    max_tokens = strict.state.model.frontend.max_model_len - 2
    assert strict.post("/v1/completions", {**PROMPT, "max_tokens": max_tokens + 1}).status_code == 400
    short = {**PROMPT, "stop": [" "], "max_tokens": max_tokens}
    assert strict.post("/v1/completions", short).status_code == 200


def test_without_strict_an_answer_gets_the_rest_of_the_context(live: Live) -> None:
    completion = live.complete([5, 6], max_tokens=50_000, stop=[" "])
    assert completion["choices"][0]["finish_reason"] == "stop"


def test_model_can_be_requested_by_its_path(strict: Live, live: Live) -> None:
    path = strict.state.options.model
    assert path is not None
    for name in (path, path.rstrip("/"), "small0"):
        answer = strict.post("/v1/completions", {**PROMPT, "model": name, "max_tokens": 1}).json()
        assert answer["model"] == name
    assert [item["id"] for item in strict.http.get("/v1/models").json()["data"]] == ["small0"]
    unknown = live.post("/v1/completions", {**PROMPT, "model": path})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
