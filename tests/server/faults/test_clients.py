"""Clients that disconnect, do not read, are too many or send megabytes."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inflight import LLM
from tests.server.faults.cases import PATH, Case, ClientView, health, make_case, process_id, wait_for_running
from tests.server.faults.conftest import MAX_QUEUE, NUM_SLOTS
from tests.server.faulty import crawling
from tests.server.live import Backend, Live
from tests.support.steps import StepRecord, observe


def connect(live: Live) -> socket.socket:
    host, _, port = live.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return connection


def send(connection: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    head += f"content-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


def test_disconnected_client_frees_its_blocks_and_others_continue(
    server: Live, threads: ThreadPoolExecutor, slow: list[Case]
) -> None:
    metrics = server.state.metrics
    before = metrics.num_disconnects, metrics.num_freed_blocks
    neighbour = slow[0].send(threads, server)
    with crawling(process_id(server)):
        for stream in (True, False):
            with connect(server) as connection:
                send(connection, {**slow[1].body, "stream": stream, "max_tokens": 2000})
                wait_for_running(server, 2)
            wait_for_running(server, 1)
    assert metrics.num_disconnects == before[0] + 2
    server.wait_until("its blocks", lambda: metrics.num_freed_blocks >= before[1] + 2)
    assert slow[0].is_correct(neighbour.result())


def test_aborts_take_effect_with_the_next_step(
    live: Live, backend: Backend, threads: ThreadPoolExecutor, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepRecord] = []
    num_before: dict[str, int] = {}  # steps before the abort, by request
    abort = backend.engine.client.abort

    async def recording_abort(request_id: str, reason: str = "abort") -> int:
        held.release()
        aborting = asyncio.ensure_future(abort(request_id, reason))
        await asyncio.sleep(0)  # it is on its way: before that, the engine may make any number of steps
        num_before[request_id] = len(steps)
        return await aborting

    monkeypatch.setattr(backend.engine.client, "abort", recording_abort)
    neighbour = make_case(llm, [9, 9], 300)
    stop = observe(backend.core, steps.append)
    try:
        with backend.held_steps() as held:
            view = neighbour.send(threads, live)
            with connect(live) as connection:
                send(connection, {**neighbour.body, "max_tokens": 2000, "stream": True})
                wait_for_running(live, 0, waiting=2)
                held.allow(10)
                wait_for_running(live, 2)
            assert neighbour.is_correct(view.result())
    finally:
        stop()
    ((name, number),) = num_before.items()
    later = [step for step in steps[number:] if any(slot.request_id == name for slot in step.slots)]
    assert len(later) <= 2  # the one that ran just then, and one that may have begun


def test_client_that_does_not_read_delays_no_one_and_loses_no_token(
    server: Live, llm: LLM, quick: Case
) -> None:
    """The engine computes the whole answer meanwhile, and no token is lost."""
    case = make_case(llm, [11, 12], 400)
    with connect(server) as connection:
        send(connection, {**case.body, "stream": True, "logprobs": 20})
        server.wait_until("its start", lambda: len(server.state.request_log) == 1)
        assert quick.is_correct(ClientView(server, quick.body))
        server.wait_until("its end in the engine", server.backend.idle)
        with connection.makefile("rb") as file:
            lines = [line[6:] for line in file if line.startswith(b"data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == case.text


def test_overloaded_server_refuses_at_once_and_finishes_accepted_requests(
    server: Live, threads: ThreadPoolExecutor, slow: list[Case], quick: Case
) -> None:
    with crawling(process_id(server)):
        neighbours = [case.send(threads, server) for case in slow[:NUM_SLOTS]]
        wait_for_running(server, NUM_SLOTS)
        neighbours += [case.send(threads, server) for case in slow[NUM_SLOTS:]]
        wait_for_running(server, NUM_SLOTS, MAX_QUEUE)
        for view in threads.map(
            lambda stream: ClientView(server, {**quick.body, "stream": stream}), [True, False] * 20
        ):
            assert (view.status, view.errors[0]["code"]) == (429, "queue_full")
            assert 1 <= int(view.headers["retry-after"]) <= 60
        wait_for_running(server, NUM_SLOTS, MAX_QUEUE)  # the refusals came at once: none of these has ended
        assert health(server) == (200, "ok")
        assert server.http.get("/ready").json()["status"] == "queue full"
    assert all(case.is_correct(future.result()) for case, future in zip(slow, neighbours, strict=True))


def test_large_invalid_bodies_do_not_stall_other_streams(
    server: Live, threads: ThreadPoolExecutor, slow: list[Case]
) -> None:
    """Megabytes of invalid input are rejected while another stream continues."""
    neighbour = slow[0].send(threads, server)
    wait_for_running(server, 1)
    numbers = ",".join(["5"] * 1_000_000)
    contents = (
        f'{{"prompt": [{numbers}]}}',
        f'{{"prompt": "x", "allowed_token_ids": [{numbers}]}}',
        '{"prompt": "x", "stop_token_ids": [' + ",".join(['"a"'] * 1_000_000) + "]}",
        json.dumps({"prompt": "word " * 1_000_000}),
        json.dumps({"prompt": "x", "bad_words": ["word " * 1000] * 1000}),
        json.dumps({"prompt": "x", **{f"k{number}": 1 for number in range(500_000)}}),
    )
    for content in contents:
        response = server.http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert len(response.content) < 1000
    assert slow[0].is_correct(neighbour.result())
