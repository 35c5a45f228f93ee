"""Plain calls from Node: the openai package, langchain's models, and the AI SDK with openai-compatible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.clients.more.node import run_script
from tests.server.live import Backend, live_server
from tests.support.held_steps import taking_turns
from tests.support.steps import observe

MODEL = "inflight-builtin"
QUESTION = "Why does it rain?"
MAX_TOKENS = 24
CLIENTS = ("openai", "langchain", "ai")


@contextmanager
def streaming(backend: Backend) -> Iterator[None]:
    """Have the server send tokens as they come: it merges those for which it had no time."""
    stop = observe(backend.core, taking_turns(backend.loop))
    try:
        yield
    finally:
        stop()


@pytest.fixture(scope="module")
def all_results(backend: Backend) -> Iterator[Any]:
    with live_server(backend, api_key=("secret",)) as live, streaming(backend):
        environment = {
            "BASE_URL": f"{live.url}/v1",
            "API_KEY": "secret",
            "MODEL": MODEL,
            "QUESTION": QUESTION,
        }
        environment |= {
            "LANGSMITH_TRACING": "false",
            "LANGCHAIN_TRACING_V2": "false",
        }  # nothing leaves this machine
        yield run_script("plain.mjs", **environment, MAX_TOKENS=str(MAX_TOKENS))
        live.wait_until_idle()


@pytest.fixture(params=CLIENTS)
def results(request: pytest.FixtureRequest, all_results: Any) -> Any:
    return all_results[request.param]


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))[0].outputs[0].text


def test_chat_and_stream_return_the_same_text(results: Any, text: str) -> None:
    assert results["whole"]["text"] == text
    assert "".join(results["streamed"]["pieces"]) == text
    assert len(results["streamed"]["pieces"]) > 1
    assert results["streamed"]["tokens"] == results["whole"]["tokens"] > 1


@pytest.mark.parametrize("way", ["refused", "refusedStream"])
def test_rejected_parameter_is_reported(results: Any, way: str) -> None:
    assert results[way]["status"] == 400
    assert "top_p is 7" in results[way]["message"]


def test_wrong_key_is_reported(results: Any) -> None:
    assert results["wrongKey"]["status"] == 401
    assert "key" in results["wrongKey"]["message"]
