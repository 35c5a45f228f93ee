"""Plain calls from Node: the openai package, langchain's models, and the AI SDK with openai-compatible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.clients.node import run_script
from tests.server.live import Backend, live_server
from tests.server.test_life import slow_steps

MODEL = "inflight-builtin"
QUESTION = "Why does it rain?"
MAX_TOKENS = 24
CLIENTS = ("openai", "langchain", "ai")


@pytest.fixture(scope="module")
def all_found(backend: Backend) -> Iterator[Any]:
    with live_server(backend, api_key=("secret",)) as live, slow_steps(backend, 0.002):
        told = {"BASE_URL": f"{live.url}/v1", "API_KEY": "secret", "MODEL": MODEL, "QUESTION": QUESTION}
        told |= {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}  # nothing leaves this machine
        yield run_script("plain.mjs", **told, MAX_TOKENS=str(MAX_TOKENS))
        live.wait_until_idle()


@pytest.fixture(params=CLIENTS)
def found(request: pytest.FixtureRequest, all_found: Any) -> Any:
    return all_found[request.param]


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))[0].outputs[0].text


def test_a_chat_and_a_stream(found: Any, text: str) -> None:
    assert found["whole"]["text"] == text
    assert "".join(found["streamed"]["pieces"]) == text
    assert len(found["streamed"]["pieces"]) > 1
    assert found["streamed"]["tokens"] == found["whole"]["tokens"] > 1


@pytest.mark.parametrize("way", ["refused", "refusedStream"])
def test_what_is_refused_is_told(found: Any, way: str) -> None:
    assert found[way]["status"] == 400
    assert "top_p is 7" in found[way]["message"]


def test_a_wrong_key_is_told(found: Any) -> None:
    assert found["wrongKey"]["status"] == 401
    assert "key" in found["wrongKey"]["message"]
