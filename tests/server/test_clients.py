"""Other packages that speak OpenAI's API, against a live server: litellm and langchain-openai."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.live import Backend, Live, live_server

MODEL = "inflight-builtin"
QUESTION = "Why does it rain?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server(backend: Backend) -> Iterator[Live]:
    with live_server(backend, api_key=("secret",)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    return llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


@pytest.fixture(scope="module", autouse=True)
def _leave_nothing_open() -> Iterator[None]:
    """These packages leave connections and event loops to the garbage collector, which warns of each. It must come for
    them here, and not in the middle of some other test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            gc.collect()


# ---- litellm ----


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own making
        import litellm
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    yield litellm
    cache: Any = litellm.in_memory_llm_clients_cache
    cache.flush_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it leaves connections and event loops to be found by others
        gc.collect()


@pytest.fixture
def asked(server: Live) -> dict[str, Any]:
    """Arguments of litellm's functions."""
    return {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "api_base": f"{server.url}/v1",
        "api_key": "secret",
        "temperature": 0,
        "max_tokens": 24,
        "max_retries": 0,
    }


its_own = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)


@its_own
def test_litellm(litellm: ModuleType, asked: dict[str, Any], text: str) -> None:
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


@its_own
async def test_litellm_async(litellm: ModuleType, asked: dict[str, Any], text: str) -> None:
    answer = await litellm.acompletion(**asked)
    assert answer.choices[0].message.content == text
    found = ""
    async for chunk in await litellm.acompletion(**asked, stream=True):
        found += chunk.choices[0].delta.content or ""
    assert found == text


@its_own
def test_litellm_completions(litellm: ModuleType, asked: dict[str, Any], llm: LLM) -> None:
    whole = llm.generate("A fox", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    del asked["messages"]
    asked |= {"model": f"text-completion-openai/{MODEL}", "prompt": "A fox", "max_tokens": 8}
    assert litellm.text_completion(**asked).choices[0].text == whole


@its_own
def test_litellm_errors(litellm: ModuleType, asked: dict[str, Any], server: Live) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**asked, "api_key": "wrong"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="top_p is 7"):
        litellm.completion(**asked, top_p=7)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 9000}]})
    server.state.draining = True
    try:
        with pytest.raises(litellm.ServiceUnavailableError):
            litellm.completion(**asked)
    finally:
        server.state.draining = False


# ---- langchain ----


@pytest.fixture
def chat(server: Live, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")  # nothing leaves this machine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI
    key: Any = "secret"
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=key,
        temperature=0,
        max_completion_tokens=24,
        max_retries=0,
    )


def test_langchain(chat: Any, text: str) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content == text
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata["output_tokens"] > 0
    again = chat.invoke([("user", QUESTION), answer, ("user", "Why?")])  # an answer sent back
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def test_langchain_stream_and_batch(chat: Any, text: str) -> None:
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == text
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0
    answers = chat.batch([QUESTION] * 8)
    assert [answer.content for answer in answers] == [text] * 8


async def test_langchain_async(chat: Any, text: str) -> None:
    assert (await chat.ainvoke(QUESTION)).content == text
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == text
    await chat.root_async_client.close()


def test_langchain_completions(server: Live, llm: LLM) -> None:
    from langchain_openai import OpenAI

    key: Any = "secret"
    client = OpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key=key, temperature=0, max_tokens=8, max_retries=0
    )
    whole = llm.generate("A fox", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    assert client.invoke("A fox") == whole
    assert "".join(client.stream("A fox")) == whole
    assert client.batch(["A fox"] * 3) == [whole] * 3


def test_langchain_errors(chat: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="functions is not supported here"):
        chat.bind(functions=[{"name": "f"}]).invoke(QUESTION)
