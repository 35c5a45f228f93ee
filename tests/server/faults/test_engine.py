"""An engine that dies, hangs, falls silent, fails a step or runs out of memory."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from inflight import LLM
from inflight.config import ProcessConfig
from tests.server.faults.cases import (
    Case,
    ClientView,
    health,
    health_of,
    make_case,
    make_cases,
    process_id,
    wait_for_running,
)
from tests.server.faulty import HANG, RAISE, crawling, hold_file, no_engine_starts
from tests.server.live import Backend, Live, ProcessBackend, live_server
from tests.support.waiting import wait_until


def test_killed_engine_ends_its_streams_with_an_error_and_restarts(
    server: Live, threads: ThreadPoolExecutor, slow: list[Case], quick: Case
) -> None:
    first = process_id(server)
    with no_engine_starts(), crawling(first):
        streams = [case.send(threads, server) for case in slow[:3]]
        whole = slow[3].send(threads, server, stream=False)
        wait_for_running(server, 4)
        server.wait_until(
            "first tokens", lambda: all(entry.first_token_at for entry in server.state.request_log)
        )
        os.kill(first, signal.SIGKILL)
        for case, stream in zip(slow, streams, strict=False):
            view = stream.result()
            assert (view.status, view.done) == (200, False)
            assert [error["code"] for error in view.errors] == ["engine_unavailable"]
            assert case.text.startswith(view.text)
        for refused in (whole.result(), ClientView(server, quick.body)):  # then, and meanwhile
            assert refused.status == 503
            assert refused.errors[0]["type"] == "service_unavailable_error"
            assert int(refused.headers["retry-after"]) > 0
        assert health(server) == (503, "restarting")
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/metrics").status_code == 200
    wait_until(lambda: health(server) == (200, "ok"), "the next engine")
    assert process_id(server) != first
    assert quick.is_correct(ClientView(server, quick.body))
    assert slow[0].is_correct(ClientView(server, {**slow[0].body, "stream": True}))
    restarts = [
        line for line in server.http.get("/metrics").text.splitlines() if "engine_restarts_total{" in line
    ]
    assert restarts[0].endswith(" 1.0")


def test_hanging_step_is_reported_as_stalled_until_it_ends(
    watched: Live, threads: ThreadPoolExecutor, llm: LLM, slow: list[Case], quick: Case
) -> None:
    neighbour = slow[0].send(threads, watched)
    wait_for_running(watched, 1)
    hanging = make_case(llm, [HANG, 1], 8)
    stuck = hanging.send(threads, watched)
    try:
        watched.wait_until("its sign", lambda: health_of(watched))
        assert health(watched) == (503, "stalled")
        view = ClientView(watched, quick.body)
        assert (view.status, view.errors[0]["code"]) == (503, "engine_unavailable")
        for logged in watched.state.request_log:
            why = watched.http.get(f"/v1/requests/{logged.request_id}").json()["why"]
            assert why.startswith("It is in the engine, which is stalled: its last step was")
            assert why.endswith("after its first token.")
    finally:
        hold_file(process_id(watched)).unlink(missing_ok=True)
    assert hanging.is_correct(stuck.result())
    assert slow[0].is_correct(neighbour.result())
    assert health(watched) == (200, "ok")
    assert quick.is_correct(ClientView(watched, quick.body))


def test_stopped_engine_process_is_killed_and_restarted(
    threads: ThreadPoolExecutor, slow: list[Case], quick: Case
) -> None:
    process = ProcessBackend(ProcessConfig(heartbeat=0.05, silent_after=2.0, kill_silent_after=3.0))
    try:
        with live_server(process) as live:
            stream = threads.submit(ClientView, live, {**slow[0].body, "stream": True, "request_id": "stuck"})
            wait_for_running(live, 1)
            live.wait_until(
                "its token", lambda: all(entry.first_token_at for entry in live.state.request_log)
            )
            os.kill(process_id(live), signal.SIGSTOP)
            view = stream.result()
            assert [error["code"] for error in view.errors] == ["engine_unavailable"]
            assert live.http.get("/v1/requests/stuck").json()["why"] == (
                "The engine died after its first token, so the timing of this request is unknown."
            )
            wait_until(lambda: health(live) == (200, "ok"), "the next engine")
            assert quick.is_correct(ClientView(live, quick.body))
            assert live.http.get("/v1/requests/stuck").json()["status"] == "failed"
    finally:
        process.close()


def test_silent_engine_process_is_reported_as_stalled_until_it_continues(
    watched: Live, threads: ThreadPoolExecutor, slow: list[Case]
) -> None:
    neighbour = slow[0].send(threads, watched)
    wait_for_running(watched, 1)
    os.kill(process_id(watched), signal.SIGSTOP)
    try:
        watched.wait_until("its sign", lambda: health_of(watched))
        assert health(watched) == (503, "stalled")
    finally:
        os.kill(process_id(watched), signal.SIGCONT)
    assert slow[0].is_correct(neighbour.result())
    assert health(watched) == (200, "ok")


def test_step_that_raises_fails_only_its_cause(
    server: Live, threads: ThreadPoolExecutor, slow: list[Case], quick: Case
) -> None:
    batch = [case.send(threads, server, stream=number > 0) for number, case in enumerate(slow[:3])]
    wait_for_running(server, 3)
    bad = threads.submit(ClientView, server, {**quick.body, "prompt": [RAISE, 1], "stream": True})
    neighbour = slow[4].send(threads, server)
    assert [error["code"] for error in bad.result().errors] == ["engine_error"]
    assert all(case.is_correct(future.result()) for case, future in zip(slow, batch, strict=False))
    assert slow[4].is_correct(neighbour.result())
    assert health(server) == (200, "ok")
    assert quick.is_correct(ClientView(server, quick.body))


def test_parameters_that_allow_no_token_are_a_400(server: Live, quick: Case) -> None:
    """The engine process detects it, and the client gets its error code."""
    view = ClientView(server, {"prompt": [5], "allowed_token_ids": [0, 2], "min_tokens": 2})
    assert (view.status, view.errors[0]["code"]) == (400, "no_token_allowed")
    assert quick.is_correct(ClientView(server, quick.body))


def test_requests_finish_correctly_when_kv_memory_runs_out(llm: LLM, threads: ThreadPoolExecutor) -> None:
    cases = make_cases(llm, [([20 + number] * 8, 80 + number) for number in range(8)])
    small = Backend(num_blocks=14, max_model_len=128, max_num_seqs=8, max_queue=64)
    try:
        with live_server(small) as live:
            with small.held_steps(5):  # until all are there
                first = threads.submit(ClientView, live, {**cases[0].body, "request_id": "oldest"})
                wait_for_running(live, 1)
                futures = [first, *(case.send(threads, live) for case in cases[1:])]
                live.wait_until("the others", lambda: len(live.state.request_log) == len(cases))
            assert all(case.is_correct(future.result()) for case, future in zip(cases, futures, strict=True))
            live.wait_until_idle()
            assert small.core.stats().num_preemptions > 0
            assert next(iter(live.state.request_log._finished.values())).request_id == "oldest"
    finally:
        small.close()
