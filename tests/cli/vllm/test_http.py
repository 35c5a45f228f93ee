"""vLLM's HTTP API: docs/from-vllm.md and the code agree, and every line of the page works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.config import EngineConfig
from inflight.engine.client import ModelFacts
from inflight.frontend.chat import ChatRequest
from inflight.frontend.frontend import Frontend
from inflight.server.http.bodies import parse_body
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.server.prepare import chat_request
from tests.cli.vllm.page import ABSENT, ACCEPTED, OTHER_NAME, SAME, Line, section
from tests.server.calling import TEMPLATE
from tests.server.live import Backend, Live, live_server
from tests.server.scripted import write_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, type[ChatBody | CompletionBody]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 1},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
# A valid value of each field; BESIDE has the fields that it needs in addition.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(("top_k", "seed", "n", "prompt_logprobs", "priority", "repetition_penalty"), 2),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), 1),
    **dict.fromkeys(("thinking_token_budget", "echo", "add_special_tokens"), None),
    **dict.fromkeys(("ignore_eos", "return_token_ids", "skip_special_tokens", "include_reasoning"), True),
    **dict.fromkeys(("parallel_tool_calls", "include_stop_str_in_output", "add_generation_prompt"), True),
    **dict.fromkeys(("stream", "continue_final_message"), False),
    "stop_token_ids": [5],
    "allowed_token_ids": [5],
    "top_logprobs": 2,
    **dict.fromkeys(("user", "cache_salt", "request_id", "stop", "guided_regex"), "abc"),
    "bad_words": ["abc"],
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "text"},
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": {"type": "integer"},
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "prediction": {"type": "content", "content": "Hello"},
    "tools": [TOOL],
    "tool_choice": "none",
    "stream_options": None,
    "model": None,
    "prompt": "Hello",
    "messages": GOOD[CHAT]["messages"],
}
BESIDE: dict[str, dict[str, Any]] = {"tools": {"tool_choice": "none"}, "top_logprobs": {"logprobs": True}}
ADMIN = {"authorization": "Bearer the-admin-key"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    backend = Backend(num_blocks=256)
    with live_server(backend, metrics_compat="vllm", admin_key="the-admin-key") as server:
        yield server
    backend.close()


def paths_of(name: str, line: Line) -> list[str]:
    only = {"completions only": COMPLETIONS, "chat only": CHAT}.get(line.here)
    return [path for path, body in BODIES.items() if name in body.model_fields and only in (None, path)]


def send(live: Live, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    response = live.post(path, {**GOOD[path], **more})
    return response.status_code, response.json()


def values_of(name: str, path: str, line: Line) -> list[Any]:
    """Return values that are accepted."""
    if line.outcome == ACCEPTED:
        return [None, "something", {"a": [1]}, True]
    if line.outcome == ABSENT:
        return [None]
    if name == "logprobs":
        return [None, path == CHAT or 2]
    return [VALUES[name]] if name in GOOD[path] else [None, VALUES[name]]


def try_field(live: Live, name: str, line: Line) -> None:
    paths = paths_of(name, line)
    assert paths, name
    for path in paths:
        if line.outcome == ABSENT:
            assert BODIES[path].unsupported()[name] == line.here
            status, answer = send(live, path, **{name: {"some": "thing"}})
            assert (status, answer["error"]["message"]) == (400, f"{name} is not supported here: {line.here}")
        for value in values_of(name, path, line):
            status, answer = send(live, path, **{name: value}, **(BESIDE.get(name, {}) if value else {}))
            assert status == 200, (path, name, value, answer)


def test_request_fields_do_what_the_page_says(live: Live) -> None:
    lines = section("Request fields")
    for line in lines:
        for name in line.names:
            if "." not in name:
                try_field(live, name, line)
    documented = {name for line in lines for name in line.names if "." not in name}
    ours = {"max_reasoning_tokens"}
    assert documented == {name for body in BODIES.values() for name in body.model_fields} - ours


def test_values_without_effect_are_accepted(live: Live) -> None:
    rows: list[dict[str, Any]] = [
        {"echo": False, "guided_json": None, "mm_processor_kwargs": None, "documents": []},
        {"max_tokens": 5, "max_completion_tokens": 1, "use_beam_search": False, "vllm_xargs": {}},
        {"top_logprobs": 0, "stream_options": {"include_usage": False}, "length_penalty": 1.0, "best_of": 1},
    ]
    for more in rows:
        path = COMPLETIONS if "best_of" in more else CHAT
        accepted = {name: value for name, value in more.items() if name in BODIES[path].model_fields}
        status, answer = send(live, path, **accepted)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1), answer


def test_routes_do_what_the_page_says(live: Live) -> None:
    document = live.http.get("/openapi.json").json()["paths"]
    assert "without the trailing slash" in live.http.get("/metrics/").json()["error"]["message"]
    for line in section("Routes"):
        for path in line.names:
            if line.outcome == ABSENT:
                response = live.http.get(path)
                assert response.status_code == 404
                assert response.json()["error"]["message"] == f"unknown path '{path}': {line.here}"
                continue
            is_page = path in ("/openapi.json", "/docs")
            assert path in document or is_page
            needs_key = line.here == "with the admin key"
            if is_page or "get" in document[path]:
                assert live.http.get(path, headers=ADMIN if needs_key else {}).status_code == 200
            if needs_key:
                assert (
                    live.http.request("GET" if "get" in document[path] else "POST", path).status_code == 401
                )


def test_metrics_have_the_names_on_the_page(live: Live) -> None:
    live.complete("Hello", max_tokens=2)
    text = live.http.get("/metrics").text
    names = {line.split("{")[0] for line in text.splitlines() if line.startswith("vllm:")}
    known = names | {name.removesuffix("_bucket") for name in names}
    for line in section("Metrics"):
        for name in line.names:
            if line.outcome == OTHER_NAME:
                assert line.code[0] in known
            assert (name in known) == (line.outcome == SAME), name
    assert all('engine="0"' in line for line in text.splitlines() if line.startswith("vllm:"))
    ours = {line.split("{")[0] for line in text.splitlines() if line.startswith("inflight:")}
    assert {name.replace("vllm:", "inflight:") for name in names} <= ours


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "parsed": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well", "reasoning_content": "Hm."}],
]


def test_llm_and_http_render_the_same_prompt(tmp_path: Path) -> None:
    """The template renders tools and tool calls."""
    facts = ModelFacts("m", 1000, 4096, (), {}, str(write_folder(tmp_path, TEMPLATE)), "", "", 64, 16, 8, 64)
    frontend = Frontend.from_config(EngineConfig.create(), facts)
    for messages in CONVERSATIONS:
        fields: dict[str, Any] = {"messages": messages, "tools": [TOOL]}
        body = parse_body(ChatBody, json.dumps(fields).encode())
        over_http = frontend.encode_chat(chat_request(body))
        assert frontend.encode_chat(ChatRequest.from_messages(**fields)) == over_http
        assert '"name": "add"' in over_http[0]
    fields = {"messages": CONVERSATIONS[-1], "continue_final_message": True}
    body = parse_body(ChatBody, json.dumps(fields).encode())
    assert frontend.encode_chat(ChatRequest.from_messages(**fields)) == frontend.encode_chat(
        chat_request(body)
    )
    frontend.close()
