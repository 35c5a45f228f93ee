"""Every refusal has the right status, names what is wrong, and changes nothing for a neighbour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.live import Backend, Live, live_server, stream

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "Hello"}

# Additions to a good body: (path, parameters, the parameter named, part of the message or code)
ROWS: list[tuple[str, dict[str, Any], str | None, str]] = [
    # unknown, unsupported, of the wrong type
    (COMPLETIONS, {"foo": 1}, "foo", "unknown parameter: foo"),
    (CHAT, {"guided_json": 5}, "guided_json", "valid"),
    (COMPLETIONS, {"guided_json": {"uniqueItems": True}}, "guided_json", "unsupported_keyword"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs.regex"),
    (COMPLETIONS, {"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    (CHAT, {"messages": [{**USER, "colour": "red"}]}, "messages[0].colour", "unknown parameter"),
    (
        CHAT,
        {"functions": [{"name": "f"}]},
        "functions",
        "functions is not supported here: send them as tools",
    ),
    (CHAT, {"echo": True}, "echo", "continue_final_message"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "never with a request"),
    (COMPLETIONS, {"best_of": 3}, "best_of", "not supported"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
    (COMPLETIONS, {"max_tokens": "5"}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens", "integer"),
    (COMPLETIONS, {"n": True}, "n", "integer"),
    (COMPLETIONS, {"stream": "yes"}, "stream", "boolean"),
    (CHAT, {"messages": "Hello"}, "messages", "array"),
    (CHAT, {"chat_template_kwargs": {"messages": "x"}}, None, "not allowed"),
    # numbers
    (COMPLETIONS, {"temperature": -0.1}, "temperature", "at least 0"),
    (COMPLETIONS, {"temperature": float("nan")}, "temperature", "finite"),
    (COMPLETIONS, {"temperature": float("inf")}, "temperature", "finite"),
    (COMPLETIONS, {"temperature": 10**400}, "temperature", ""),
    (COMPLETIONS, {"top_p": 0}, "top_p", "(0, 1]"),
    (COMPLETIONS, {"top_p": 1.1}, "top_p", "(0, 1]"),
    (COMPLETIONS, {"top_k": -2}, "top_k", "at least -1"),
    (COMPLETIONS, {"min_p": 2}, "min_p", "[0, 1]"),
    (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    (COMPLETIONS, {"n": 0}, "n", "from 1"),
    (COMPLETIONS, {"n": 10**9}, "n", "from 1"),
    (COMPLETIONS, {"logprobs": 10**6}, "logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    (CHAT, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs", "from 0 to 20"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "echo"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "must not exceed"),
    (COMPLETIONS, {"seed": 2**70}, "seed", "integer"),
    (COMPLETIONS, {"priority": 2**40}, "priority", "integer"),
    # token ids
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "token id -1"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt", "token id 1000000"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt", "token id"),
    (COMPLETIONS, {"prompt": [1, 2.5]}, "prompt", "integers"),
    (COMPLETIONS, {"prompt": [False]}, "prompt", "true or false"),
    (COMPLETIONS, {"prompt": [[1], [2, True]]}, "prompt", "true or false"),
    (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt", "integers"),
    (COMPLETIONS, {"stop_token_ids": [5, True]}, "stop_token_ids[1]", "integer"),
    (CHAT, {"allowed_token_ids": [True]}, "allowed_token_ids[0]", "integer"),
    (CHAT, {"logit_bias": {"true": 1}}, "logit_bias", "integer"),
    (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    (COMPLETIONS, {"logit_bias": {"5": 1000}}, "logit_bias", "[-100, 100]"),
    (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    (COMPLETIONS, {"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
    (COMPLETIONS, {"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
    (COMPLETIONS, {"bad_words": [""]}, "bad_words", "non-empty"),
    (COMPLETIONS, {"bad_words": ["x" * 257]}, "bad_words", "at most 256"),
    (COMPLETIONS, {"allowed_token_ids": [5] * 4000}, "allowed_token_ids", "the vocabulary has only 3072"),
    (COMPLETIONS, {"stop_token_ids": [5] * 4000}, "stop_token_ids", "the vocabulary has only 3072"),
    (COMPLETIONS, {"stop_token_ids": ["x"] * 100_000}, "stop_token_ids[0]", "valid integer"),
    (COMPLETIONS, {"allowed_token_ids": [0, 2], "min_tokens": 2}, None, "no_token_allowed"),
    (COMPLETIONS, {"allowed_token_ids": [5], "bad_words": ["#"], "stream": False}, None, "no_token_allowed"),
    # prompts
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": None}, "prompt", "NoneType"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt", "dict"),
    (COMPLETIONS, {"prompt": [None]}, "prompt", "NoneType"),
    (COMPLETIONS, {"prompt": ["x", 3]}, "prompt", "prompt[1] is of type int"),
    (COMPLETIONS, {"prompt": ["x"] * 100_000}, "prompt", "too_many_answers"),
    (COMPLETIONS, {"prompt": ["x"] * 2, "n": 100}, "n", "too_many_answers"),
    (COMPLETIONS, {"prompt": [5] * 4096}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "word " * 9000}, "prompt", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a" * 1_000_000}, "prompt", "1000000 characters"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "prompt", "1000000 characters"),
    # None of these is tokenized: refusals that count tokens come after that.
    (
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "[" * 1_000_000},
                        }
                    ],
                },
            ]
        },
        "prompt",
        "characters",
    ),
    (
        CHAT,
        {
            "messages": [USER],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"enum": [123_456] * 100_000}}}
            ],
        },
        "prompt",
        "characters",
    ),
    (
        RESPONSES,
        {
            "tools": [
                {"type": "function", "name": "f", "parameters": {}},
                {"type": "function", "name": "hidden", "parameters": {}, "description": "a" * (1 << 20)},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
        "tools",
        "at most 1048576",
    ),
    (RESPONSES, {"prompt_cache_key": "a" * (1 << 20)}, "tools", "at most 1048576"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": [USER] * 9000}, "messages", "at most 8192"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "images are not supported",
    ),
    # stop strings
    (COMPLETIONS, {"stop": ""}, "stop", "at least 1 character"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0: it must be"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0: it must be"),
    (COMPLETIONS, {"stop": ["x"] * 17}, "stop", "at most 16"),
    (COMPLETIONS, {"stop": ["x" * 257]}, "stop", "at most 256"),
    (COMPLETIONS, {"stop": 5}, "stop", "valid string or input should be a valid array"),
    # names
    (COMPLETIONS, {"cache_salt": "x" * 300}, "cache_salt", "256"),
    (COMPLETIONS, {"cache_salt": 5}, "cache_salt", "string"),
    (COMPLETIONS, {"request_id": "a b"}, "request_id", "pattern"),
    (COMPLETIONS, {"request_id": "x" * 129}, "request_id", "pattern"),
    (COMPLETIONS, {"user": "x" * 300}, "user", "256"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
]

# Unknown fields: with --ignore-unknown-fields they are ignored, and missing fields are still refused.
UNKNOWN: list[tuple[dict[str, Any], int]] = [
    ({"foo": {"bar": 1}}, 200),
    ({"messages": [{**USER, "colour": "red"}]}, 200),
    ({"stream_options": {"every": 5}}, 200),
    ({"use_beam_search": True}, 400),
    ({"top_p": "x"}, 400),
]

NEIGHBOUR = {"prompt": "The little fox", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def neighbours_text(llm: LLM) -> str:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate("The little fox", params)[0].outputs[0].text


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def refused(live: Live, path: str, content: str | bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    response = live.http.post(path, content=content, headers={"content-type": "application/json", **headers})
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status_code, body["error"]


@pytest.mark.parametrize(("path", "more", "param", "message"), ROWS)
def test_invalid_parameters_are_rejected_and_other_streams_continue(
    path: str,
    more: dict[str, Any],
    param: str | None,
    message: str,
    live: Live,
    neighbours_text: str,
    threads: ThreadPoolExecutor,
) -> None:
    good: dict[str, Any] = {
        COMPLETIONS: {"prompt": "x"},
        CHAT: {"messages": [USER]},
        RESPONSES: {"input": "x"},
    }
    body = {**good[path], **more}
    neighbour = threads.submit(stream, live, COMPLETIONS, NEIGHBOUR)
    status, error = refused(live, path, json.dumps(body))
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"] or message == error["code"]
    assert len(error["message"]) < 1000
    text = "".join(event["choices"][0]["text"] for event in neighbour.result())
    assert text == neighbours_text


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'{"max_tokens": 3}', "missing_parameter"),
        (b'{"prompt": ' + b"[" * 50_000, "invalid_json"),
    ],
)
def test_bodies_that_are_not_json_objects_are_rejected(content: bytes, code: str, live: Live) -> None:
    status, error = refused(live, COMPLETIONS, content)
    assert (status, error["code"]) == (400, code)


def test_unknown_models_paths_methods_and_types_are_rejected(live: Live) -> None:
    status, error = refused(live, COMPLETIONS, b'{"prompt": "x", "model": "other"}')
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert refused(live, "/v1/nothing", b"{}")[0] == 404
    assert refused(live, "/v1/completions/", b"{}")[0] == 404
    assert "use /v1/chat/completions" in refused(live, "/chat/completions", b"{}")[1]["message"]
    assert refused(live, "/v1/models", b"{}")[0] == 405
    assert refused(live, COMPLETIONS, b"prompt=x", **{"content-type": "text/plain"})[0] == 415
    assert live.http.get("/v1/requests/unknown").json()["error"]["code"] == "request_not_found"
    assert live.http.get("/v1/models/other").status_code == 404


def test_max_tokens_beyond_the_context_is_reduced(live: Live) -> None:
    answer = live.complete([5] * 4088, max_tokens=10**6, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8


def test_internal_errors_reveal_nothing(
    live: Live, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("/secret/path")

    input_processor = type(backend.engine.frontend.input_processor)
    monkeypatch.setattr(input_processor, "requests", broken)
    status, error = refused(live, COMPLETIONS, b'{"prompt": "x"}')
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "secret" not in error["message"]
    assert "/secret/path" in caplog.text


def test_unknown_fields_are_ignored_on_request_and_limits_still_hold(backend: Backend) -> None:
    with live_server(backend, ignore_unknown_fields=True, max_prompt_tokens=100, max_output_tokens=8) as live:
        for more, status in UNKNOWN:
            response = live.post(CHAT, {"messages": [USER], "max_tokens": 1, **more})
            assert response.status_code == status, (more, response.text)
        _check_limits(live)


def _check_limits(live: Live) -> None:
    long = json.dumps({"prompt": [5] * 101}).encode()
    assert refused(live, COMPLETIONS, long)[1]["code"] == "context_length_exceeded"
    assert refused(live, COMPLETIONS, b'{"prompt": [5], "max_tokens": 9}')[1]["param"] == "max_tokens"
    answer = live.complete([5], max_tokens=8, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
