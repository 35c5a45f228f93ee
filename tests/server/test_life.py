"""Clients that disconnect, steps that fail and servers that stop, while other requests continue."""

from __future__ import annotations

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.server.config import ServerConfig
from inflight.server.run import Server
from inflight.server.state import TEXT_THREADS
from tests.e2e.breaking import BreakingRunner
from tests.server.live import Backend, Live, live_server, stream
from tests.support.waiting import until_idle

PATH = "/v1/completions"
POST = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ENDLESS = {"prompt": [5, 6], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
GOOD = {"prompt": [5, 6], "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    return (
        llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs[0].text
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnected_client_frees_its_blocks(
    streamed: bool, n: int, live: Live, backend: Backend, text: str
) -> None:
    metrics = live.state.metrics
    before = metrics.num_disconnects, metrics.num_freed_blocks
    body = json.dumps({**ENDLESS, "stream": streamed, "n": n, "temperature": 0.7}).encode()
    host, _, port = live.url.removeprefix("http://").partition(":")
    with ThreadPoolExecutor(1) as threads, backend.held_steps(40) as held:
        with socket.create_connection((host, int(port))) as connection:
            head = f"{POST}content-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            live.wait_until("blocks in use", lambda: backend.core.scheduler.pool.usage().num_used >= 2 * n)
            neighbour = threads.submit(live.complete, **GOOD)
            live.wait_until("a neighbour", lambda: len(live.state.request_log) == 2)
        live.wait_until("its end", lambda: metrics.num_disconnects == before[0] + 1)
        live.wait_until("its blocks", lambda: metrics.num_freed_blocks >= before[1] + 2 * n)
        held.release()
        assert neighbour.result()["choices"][0]["text"] == text
    live.wait_until_idle()


def test_client_that_does_not_read_stalls_no_one(backend: Backend, text: str) -> None:
    body = json.dumps({**ENDLESS, "stream": True, "n": 16, "temperature": 1.0, "logprobs": 20}).encode()
    with live_server(backend) as live:
        host, _, port = live.url.removeprefix("http://").partition(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"{POST}content-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            live.wait_until("a start", lambda: len(live.state.request_log) == 1)
            assert live.complete(**GOOD)["choices"][0]["text"] == text
        live.wait_until_idle()


def test_client_that_reads_late_gets_every_token(live: Live, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    whole = llm.generate([5, 6], params)[0].outputs[0].text
    text = ""
    with live.http.stream("POST", PATH, json={**ENDLESS, "max_tokens": 120, "stream": True}) as response:
        live.wait_until("its end in the engine", live.backend.idle)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == whole


@pytest.mark.parametrize("streamed", [False, True])
def test_failed_step_ends_only_its_requests(streamed: bool, live: Live, backend: Backend, text: str) -> None:
    runner = BreakingRunner(backend.core, "collect", 5)
    try:
        with live.http.stream("POST", PATH, json={**GOOD, "stream": streamed}) as response:
            content = response.read().decode()
        if streamed:
            assert response.status_code == 200
            assert "[DONE]" not in content
            error = json.loads(content.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 500
            error = json.loads(content)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert "RuntimeError" not in content
        assert live.http.get("/health").status_code == 200
        assert live.complete(**GOOD)["choices"][0]["text"] == text
    finally:
        backend.core.runner = runner.real


def test_draining_lets_streams_finish_and_refuses_new_work(backend: Backend, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    text = llm.generate([5, 6], params)[0].outputs[0].text
    with live_server(backend, shutdown_timeout=60.0) as live, backend.held_steps(5) as held:
        with live.http.stream("POST", PATH, json={**GOOD, "max_tokens": 400, "stream": True}) as response:
            backend.loop.call_soon_threadsafe(live.server.stop)
            live.wait_until("draining", lambda: live.state.draining)
            assert live.http.get("/health").status_code == 503
            assert live.http.get("/health").json()["status"] == "draining"
            assert live.http.get("/ready").status_code == 503
            refused = live.post(PATH, GOOD)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in refused.headers
            held.release()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text
        live.finished.result(60)
        live.finished = _Done()


class _Done:
    def result(self, timeout: float) -> None:
        """Return at once: the server has stopped already."""


def test_streams_that_outlast_the_shutdown_timeout_end_with_an_error(backend: Backend) -> None:
    with live_server(backend, shutdown_timeout=0.1) as live:
        with (
            backend.held_steps(5),
            live.http.stream("POST", PATH, json={**ENDLESS, "stream": True}) as response,
        ):
            backend.loop.call_soon_threadsafe(live.server.stop)
            content = response.read().decode()
        assert json.loads(content.strip().split("\n\n")[-1][6:])["error"]["code"] == "shutting_down"
        live.finished.result(60)
        live.finished = _Done()
    backend.run(until_idle(backend.engine))


# ---- reports of requests ----


def test_report_of_a_finished_request_adds_up(live: Live) -> None:
    prompt = [11] * 100
    live.complete(prompt, max_tokens=5, ignore_eos=True)
    live.complete(prompt, max_tokens=5, ignore_eos=True, n=2, request_id="report-1")
    report = live.http.get("/v1/requests/report-1").json()
    assert (report["id"], report["status"], report["route"]) == ("report-1", "finished", PATH)
    assert [answer["index"] for answer in report["answers"]] == [0, 1]
    for answer in report["answers"]:
        assert answer["finish_reason"] == "length"
        assert (answer["num_prompt_tokens"], answer["num_cached_tokens"]) == (100, 96)
        assert answer["num_output_tokens"] == 5
        for name in ("queued_seconds", "prefill_seconds", "decode_seconds"):
            assert 0 <= answer[name] <= report["total_seconds"]
        breakdown = answer["breakdown"]
        total = sum(breakdown["queue"].values()) + sum(
            breakdown[name] for name in breakdown if name != "queue"
        )
        parts = [answer[name] for name in ("queued_seconds", "prefill_seconds", "decode_seconds")]
        assert total == pytest.approx(sum(parts), abs=1e-6), "the engine lets it go with its last token"
    assert "4 tokens computed, 96 cached" in report["why"]
    assert report["client_seconds"] >= 0


def test_report_of_a_queued_request_names_what_it_waits_for(live: Live, backend: Backend) -> None:
    rows = backend.core.scheduler.pool._free_rows
    kept = rows[:]
    rows[:] = rows[:1]
    try:
        with (
            backend.held_steps(5),
            live.http.stream("POST", PATH, json={**ENDLESS, "stream": True, "request_id": "first"}),
            live.http.stream("POST", PATH, json={**GOOD, "stream": True, "request_id": "second"}),
        ):
            report = live.http.get("/v1/requests/second").json()
            assert report["status"] == "queued"
            assert report["waited_for"]["ids"] == ["first"]
            assert report["waited_for"]["num_requests"] == 1
            deleted = live.http.delete("/v1/requests/second").json()
            assert deleted == {
                "id": "second",
                "object": "request.cancelled",
                "cancelled": True,
                "freed_blocks": 0,
            }
            assert live.http.delete("/v1/requests/first").json()["freed_blocks"] > 0
        assert live.http.delete("/v1/requests/first").json()["cancelled"] is False
    finally:
        live.wait_until_idle()
        rows[:] = kept


def test_request_cancelled_early_never_reaches_the_engine(live: Live) -> None:
    go_on = threading.Event()
    held = [live.state.threads.submit("", go_on.wait) for _ in range(TEXT_THREADS)]
    chat = {"messages": [{"role": "user", "content": "x"}], "request_id": "early"}
    num_requests = live.state.metrics.requests["generate"]
    with ThreadPoolExecutor(1) as threads:
        response_of_chat = threads.submit(live.post, "/v1/chat/completions", chat)
        try:
            live.wait_until("the request", lambda: len(live.state.request_log))
            assert live.http.delete("/v1/requests/early").json()["cancelled"] is True
            response = response_of_chat.result(30)
        finally:
            go_on.set()
    assert (response.status_code, response.json()["error"]["code"]) == (409, "cancelled")
    assert live.http.get("/v1/requests/early").json()["status"] == "cancelled"
    assert all(future.result() for future in held)
    assert live.state.metrics.requests["generate"] == num_requests


def test_request_history_is_bounded(backend: Backend) -> None:
    with live_server(backend, request_history=2) as live:
        for number in range(4):
            live.complete([5], max_tokens=1, request_id=f"h{number}")
        statuses = [live.http.get(f"/v1/requests/h{number}").status_code for number in range(4)]
        assert statuses == [404, 404, 200, 200]
        assert len(live.state.request_log._by_engine_id) == 2


def test_request_id_can_be_reused(live: Live) -> None:
    for _ in range(2):
        assert live.complete([5], max_tokens=1, request_id="again")["id"] == "again"
    events = stream(live, PATH, {"prompt": [5], "max_tokens": 1, "request_id": "again"})
    assert events[0]["id"] == "again"


def test_concurrent_streams_get_every_token_while_others_disconnect(
    live: Live, backend: Backend, text: str
) -> None:
    """A third of the clients disconnect early; the others get every token."""

    def stream_one(number: int) -> str | None:
        body: dict[str, Any] = {**(ENDLESS if number % 3 == 0 else GOOD), "stream": True}
        texts = ""
        with live.http.stream("POST", PATH, json=body) as response:
            for count, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    texts += json.loads(line[6:])["choices"][0]["text"]
                if number % 3 == 0 and count > number:
                    return None
        return texts

    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(stream_one, range(48)))
    assert [item for number, item in enumerate(texts) if number % 3] == [text] * 32
    live.wait_until_idle()
    usage = backend.core.scheduler.pool.usage()
    assert usage.num_empty + usage.num_cached == usage.num_blocks


@pytest.mark.parametrize("is_ignored", [False, True])
async def test_sighup_is_handled_unless_it_is_ignored(is_ignored: bool) -> None:
    before = signal.getsignal(signal.SIGHUP)
    mine = signal.SIG_IGN if is_ignored else signal.SIG_DFL  # nohup ignores it
    signal.signal(signal.SIGHUP, mine)
    try:
        server = Server(ServerConfig())
        with server.capture_signals():
            assert signal.getsignal(signal.SIGHUP) == (mine if is_ignored else server.handle_exit)
        assert signal.getsignal(signal.SIGHUP) == mine
    finally:
        signal.signal(signal.SIGHUP, before)
