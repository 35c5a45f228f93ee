"""The openai package against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from inflight import LLM, SamplingParams
from inflight.errors import EngineDeadError, EngineError, QueueFullError
from tests.server.live import Backend, Live, live_server

MODEL = "inflight-builtin"
MESSAGES: Any = [{"role": "user", "content": "Why does it rain?"}]


@pytest.fixture(scope="module")
def server(backend: Backend) -> Iterator[Live]:
    with live_server(backend, api_key=("secret",)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    return llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_answers_with_logprobs_and_usage(client: openai.OpenAI, text: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24, logprobs=True, top_logprobs=1
    )
    (choice,) = answer.choices
    assert choice.message.content == text
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id == answer.id
    again = [*MESSAGES, choice.message.model_dump(), {"role": "user", "content": "Why?"}]
    follow_up = client.chat.completions.create(model=MODEL, messages=again, max_tokens=3)
    assert follow_up.choices[0].finish_reason in ("length", "stop")


def test_streamed_chat_adds_up_and_ends_with_usage(client: openai.OpenAI, text: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None


def test_leaving_a_stream_frees_the_request(client: openai.OpenAI, server: Live) -> None:
    with client.completions.create(
        model=MODEL, prompt=[5, 6], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    server.wait_until_idle()


def test_completions_echo_and_stream(client: openai.OpenAI, llm: LLM) -> None:
    whole = llm.generate("A fox", SamplingParams(temperature=0, max_tokens=8, n=1))[0].outputs[0]
    answer = client.completions.create(
        model=MODEL, prompt=["A fox", "A cat"], temperature=0, max_tokens=8, logprobs=2, echo=True
    )
    assert answer.choices[0].text == "A fox" + whole.text
    stream = client.completions.create(
        model=MODEL, prompt="A fox", temperature=0, max_tokens=8, stream=True, extra_body={"top_k": 5}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.text


async def test_async_client_streams(server: Live, text: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24, stream=True
        )
        streamed = ""
        async for chunk in stream:
            streamed += chunk.choices[0].delta.content or ""
    assert streamed == text


async def test_async_client_raises_errors(server: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="top_p is 7"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, top_p=7, stream=True)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()


def test_several_answers_match_an_offline_run(client: openai.OpenAI, llm: LLM) -> None:
    fields = {**llm.get_default_sampling_fields(), "temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 12}
    params = SamplingParams(**fields)
    texts = [output.text for output in llm.chat(MESSAGES, params)[0].outputs]
    body: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 1, "seed": 3, "n": 3, "max_tokens": 12}
    answer = client.chat.completions.create(**body)
    assert [choice.message.content for choice in answer.choices] == texts
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_stream_helper_assembles_the_whole_answer(client: openai.OpenAI, text: str) -> None:
    """The helper accepts only chunks of exactly OpenAI's shape."""
    body: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    usage: Any = {"include_usage": True}
    with client.chat.completions.stream(**body, logprobs=True, stream_options=usage) as events:
        kinds = {event.type for event in events}
        whole = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens


def test_raw_response_has_the_request_id(client: openai.OpenAI, text: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24, extra_body={"request_id": "raw-1"}
    )
    assert raw.headers["x-request-id"] == raw.parse().id == "raw-1"
    assert raw.parse().choices[0].message.content == text
    with client.completions.with_streaming_response.create(model=MODEL, prompt="x", max_tokens=2) as response:
        assert response.parse().object == "text_completion"


def test_client_timeout_frees_the_request(client: openai.OpenAI, server: Live, backend: Backend) -> None:
    before = server.state.metrics.num_disconnects
    with backend.held_steps(5):
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1.0).completions.create(
                model=MODEL, prompt="x", max_tokens=2000, extra_body={"ignore_eos": True}
            )
        server.wait_until("its end", lambda: server.state.metrics.num_disconnects == before + 1)
    server.wait_until_idle()


def test_errors_have_their_own_exception_classes(client: openai.OpenAI, server: Live) -> None:
    with pytest.raises(openai.AuthenticationError, match="not valid for this server"):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="is not served here") as not_found:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="functions is not supported") as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, functions=[{"name": "f"}])
    assert bad.value.param == "functions"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    server.state.draining = True
    try:
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.completions.create(model=MODEL, prompt="x")
    finally:
        server.state.draining = False


@pytest.mark.parametrize(
    "refusal", [QueueFullError("full"), EngineDeadError("it restarts")], ids=["full", "restarting"]
)
def test_retries_wait_for_retry_after(
    refusal: EngineError,
    client: openai.OpenAI,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """429 and 503 are tried again, after what Retry-After says."""
    tries: list[Any] = []
    waits: list[tuple[float, str]] = []
    add = backend.core.add

    def refuse_at_first(request: Any) -> None:
        tries.append(request)
        if len(tries) == 1:
            raise refusal
        add(request)

    monkeypatch.setattr(backend.core, "add", refuse_at_first)
    monkeypatch.setattr(openai.OpenAI, "_sleep_for_retry", waiting(waits))
    answer = client.with_options(max_retries=2).completions.create(
        model=MODEL, prompt="x", max_tokens=1, temperature=0
    )
    assert answer.choices[0].text
    assert len(tries) == 2
    ((seconds, retry_after),) = waits
    assert seconds == float(retry_after) >= 1


def waiting(waits: list[tuple[float, str]]) -> Any:
    """Return a stand-in for the client's pause that records its length and Retry-After."""

    def note(self: Any, *, retries_taken: int, max_retries: int, options: Any, response: Any) -> None:
        left, headers = max_retries - retries_taken, response.headers
        waits.append((self._calculate_retry_timeout(left, options, headers), headers["retry-after"]))

    return note


def test_error_in_a_stream_is_raised(client: openai.OpenAI, server: Live, backend: Backend) -> None:
    from tests.e2e.breaking import BreakingRunner

    server.wait_until_idle()  # the engine is all tests': of several requests, none is blamed for one failed step
    runner = BreakingRunner(backend.core, "collect", 3)
    try:
        endless = {"ignore_eos": True}  # at least until that step
        stream = client.completions.create(
            model=MODEL, prompt="x", max_tokens=20, stream=True, extra_body=endless
        )
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
    finally:
        backend.core.runner = runner.real
