"""A stream that is silent for a while sends pings, so that proxies do not cut its connection."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.types import Message, Send

from inflight.server.config import SERVE_OPTIONS
from inflight.server.engine_response import Pings
from inflight.server.state import TEXT_THREADS
from tests.server.calling import CallingBackend
from tests.server.live import Live, live_server

MESSAGES = [{"role": "user", "content": "Why?"}]
COMMENT = ": ping\n\n"
EVENT = 'event: ping\ndata: {"type":"ping"}\n\n'
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "Why?", "max_tokens": 16}, COMMENT),
    "/v1/chat/completions": ({"messages": MESSAGES}, COMMENT),
    "/v1/responses": ({"input": "Why?"}, COMMENT),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 16}, EVENT),
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallingBackend]:
    backend = CallingBackend(tmp_path_factory.mktemp("tokenizer"))
    yield backend
    backend.close()


@pytest.fixture
def server(scripted: CallingBackend) -> Iterator[Live]:
    with live_server(scripted, ping_interval=0.03) as live:
        yield live
        live.wait_until_idle()


def test_default_interval_is_ten_seconds() -> None:
    assert SERVE_OPTIONS["ping_interval"].default == 10


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("num_tokens", [0, 2], ids=["before the first token", "between tokens"])
def test_silent_stream_sends_pings(
    server: Live, scripted: CallingBackend, path: str, num_tokens: int
) -> None:
    body, ping = STREAMS[path]
    scripted.say("Because of clouds.")
    scripted.client.num_allowed = num_tokens
    received = ""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for text in response.iter_text():
            received += text
            if received.endswith(2 * ping):
                scripted.client.num_allowed = math.inf
    undisturbed = server.post(path, {**body, "stream": True}).text
    assert data_lines(received.replace(ping, "")) == data_lines(undisturbed.replace(ping, ""))


def data_lines(events: str) -> int:
    assert '"error":{' not in events
    return events.count("data: ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_stream_that_started_with_a_ping_gets_its_error_as_an_event(server: Live, path: str) -> None:
    body, ping = STREAMS[path]
    long = "Why? " * 4096
    body = (
        {**body, "input": long}
        if "input" in body
        else {**body, "messages": [{**MESSAGES[0], "content": long}]}
    )
    release = threading.Event()
    held = [server.state.threads.submit("", release.wait) for _ in range(TEXT_THREADS)]
    received = ""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for text in response.iter_text():
            received += text
            if received.endswith(2 * ping):
                release.set()
    assert all(future.result() for future in held)
    last = json.loads(received.strip().splitlines()[-1].removeprefix("data: "))
    assert "error" in json.dumps(last)
    assert "at most" in json.dumps(last)


@pytest.mark.parametrize("path", STREAMS)
def test_whole_answer_has_no_pings(server: Live, scripted: CallingBackend, path: str) -> None:
    body, ping = STREAMS[path]
    scripted.say("Because of clouds.")
    scripted.client.num_allowed = 0
    with ThreadPoolExecutor(1) as threads:
        whole = threads.submit(server.post, path, body)
        server.wait_until("the request", lambda: len(server.state.request_log) == 1)
        with server.http.stream("POST", path, json={**body, "stream": True}) as stream:
            received = ""
            for text in stream.iter_text():
                received += text
                if received.endswith(2 * ping):  # a stream that began later has had two
                    scripted.client.num_allowed = math.inf
        response = whole.result()
    assert response.status_code == 200
    assert "clouds" in json.dumps(response.json())


@pytest.fixture
def after_two_pings(scripted: CallingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the next stream comes after its second ping."""
    scripted.say("Because of clouds.")
    scripted.client.num_allowed, num_sent, send_ping = 0, 0, Pings._send_ping

    async def counting(pings: Pings) -> None:
        nonlocal num_sent
        await send_ping(pings)
        num_sent += 1
        if num_sent == 2:
            scripted.client.num_allowed = math.inf

    monkeypatch.setattr(Pings, "_send_ping", counting)


@pytest.mark.usefixtures("after_two_pings")
def test_anthropic_client_ignores_pings(server: Live) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        question: Any = {"model": server.state.model.label, "max_tokens": 16, "messages": MESSAGES}
        with client.messages.stream(**question) as stream:
            assert stream.get_final_text() == "Because of clouds."


@pytest.mark.usefixtures("after_two_pings")
def test_openai_client_ignores_pings(server: Live) -> None:
    import openai

    messages: Any = MESSAGES
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=server.state.model.label, messages=messages, stream=True
        )
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Because of clouds."


async def silence(pings: Pings) -> None:
    """Have the timer find that nothing was sent for as long as it allows."""
    pings._sent_at -= pings._seconds
    pings._timer.cancel()
    pings._check()
    await asyncio.sleep(0)  # a ping begins now, if one was due


async def test_client_that_does_not_read_gets_one_ping() -> None:
    num_sent, is_read = 0, asyncio.Event()

    async def send(_: Message) -> None:
        nonlocal num_sent
        num_sent += 1
        await is_read.wait()

    pings = Pings(send, 1000.0, lambda send: send({}))
    for _ in range(3):
        await silence(pings)
    assert num_sent == 1
    is_read.set()
    await pings.settle()
    is_read.clear()
    answering = asyncio.create_task(pings({}))
    await asyncio.sleep(0)
    for _ in range(3):
        await silence(pings)
    assert num_sent == 2, "a ping was sent although the answer is not read"
    is_read.set()
    await answering
    await pings.stop()


async def test_stream_that_keeps_sending_gets_no_pings() -> None:
    async def send(_: Message) -> None:
        pass

    num_pings = 0

    async def ping(_: Send) -> None:
        nonlocal num_pings
        num_pings += 1

    pings = Pings(send, 1000.0, ping)
    for _ in range(3):
        pings._sent_at -= 999.0
        await pings({})
        pings._timer.cancel()
        pings._check()
        await asyncio.sleep(0)
    assert num_pings == 0
    await silence(pings)
    assert num_pings == 1
    await pings.stop()
