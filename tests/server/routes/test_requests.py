"""/v1/requests: lists in pages, reports in pages, and their cost for others."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.engine.client import RequestState
from inflight.engine.inproc import InprocClient
from inflight.events import RequestRecord
from inflight.server.access.keys import Caller
from inflight.server.observability.request_log import LoggedRequest, RequestLog, latest_first
from inflight.server.routes import requests as routes
from inflight.timeline import recorder
from inflight.timeline.chunks import TimelinePage, TimelineQuery
from tests.server.live import Backend, Live, live_server
from tests.support.held_steps import held_steps

PATH = "/v1/completions"
LIST = "/v1/requests"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 2000, "stream": True}
KEYS = """
keys:
  - {name: one, key: one-key}
  - {name: two, key: two-key}
  - {name: single, key: single-key, max_concurrent: 1}
  - {name: few, key: few-key, requests_per_minute: 3}
"""


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


@pytest.fixture
def fresh(backend: Backend) -> Iterator[Live]:
    """A server that has had no requests."""
    with live_server(backend) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture
def keyed(backend: Backend, tmp_path: Path) -> Iterator[Live]:
    (tmp_path / "keys.yaml").write_text(KEYS)
    with live_server(backend, keys=str(tmp_path / "keys.yaml"), admin_key="admin-key") as live:
        yield live
        live.wait_until_idle()


def send(live: Live, request_id: str, key: str | None = None, **body: Any) -> None:
    headers = None if key is None else bearer(key)
    response = live.post(PATH, {**BODY, **body, "request_id": request_id}, headers=headers)
    assert response.status_code == 200, response.text


def listed(live: Live, **params: Any) -> Any:
    response = live.http.get(LIST, params=params)
    assert response.status_code == 200, response.text
    return response.json()


def ids(page: Any) -> list[str]:
    return [item["id"] for item in page["data"]]


def client_of(backend: Backend) -> InprocClient:
    assert isinstance(backend.engine.client, InprocClient)
    return backend.engine.client


def log_finished(live: Live, count: int) -> None:
    """Log requests that have finished, without sending them."""

    async def add() -> None:
        log = live.state.request_log
        for index in range(count):
            logged = LoggedRequest(f"x{index}", Caller(), PATH, False, 0, "", lambda _: None)
            log.open(logged)
            log.close(logged, "finished")

    live.backend.run(add())


# ---- what a list has ----


def test_list_has_totals_in_place_of_answers(fresh: Live) -> None:
    send(fresh, "several", n=3, prompt=[11] * 40)
    (summary,) = listed(fresh)["data"]
    report = fresh.http.get(f"{LIST}/several").json()
    assert "answers" not in summary
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_preemptions"):
        assert summary[name] == report[name] == sum(answer[name] for answer in report["answers"])
    assert summary["num_answers"] == len(report["answers"]) == 3
    assert summary["why"] == report["why"].replace(" behind 2 others", "")
    assert {name: summary[name] for name in ("id", "status", "total_seconds", "tenant")} == {
        name: report[name] for name in ("id", "status", "total_seconds", "tenant")
    }


def test_engine_is_asked_only_about_one_answer_of_requests_in_progress(
    fresh: Live, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, described = client_of(backend), list[str]()
    describe = client.describe

    async def spy(request_id: str) -> RequestState | None:
        described.append(request_id)
        return await describe(request_id)

    monkeypatch.setattr(client, "describe", spy)
    send(fresh, "ended", n=8)
    assert ids(listed(fresh)) == ["ended"]
    assert not described
    body = {**ENDLESS, "n": 8, "request_id": "endless"}
    with held_steps(client, 5), fresh.http.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        running, ended = listed(fresh)["data"]
        assert (running["id"], running["status"], ended["status"]) == ("endless", "running", "finished")
        assert running["num_output_tokens"] >= 1
        assert running["num_prompt_tokens"] == 8 * 3
        assert len(described) == 1


def test_cut_short_answers_keep_their_tokens_in_the_totals(fresh: Live, backend: Backend) -> None:
    with held_steps(client_of(backend), 5):
        with fresh.http.stream("POST", PATH, json={**ENDLESS, "request_id": "left"}) as response:
            next(response.iter_lines())
        fresh.wait_until_idle()
    (summary,) = listed(fresh)["data"]
    assert summary["status"] == "cancelled"
    assert summary["num_output_tokens"] >= 1


# ---- pages ----


def read_all(live: Live, limit: int, **params: Any) -> list[list[str]]:
    """Return the ids of all pages, from the first to the last."""
    page = listed(live, limit=limit, **params)
    pages = [ids(page)]
    while page["has_more"]:
        page = listed(live, limit=limit, after=pages[-1][-1], **params)
        pages.append(ids(page))
    return pages


def test_pages_cover_everything_once_while_requests_come_in(fresh: Live) -> None:
    for number in range(12):
        send(fresh, str(number))
    seen: list[str] = []
    page = listed(fresh, limit=5)
    while True:
        seen += ids(page)
        send(fresh, f"new-{len(seen)}")
        if not page["has_more"]:
            break
        page = listed(fresh, limit=5, after=seen[-1])
    assert seen == [str(number) for number in reversed(range(12))]
    assert len(ids(listed(fresh))) == 12 + 3


def test_has_more_counts_only_selected_requests(fresh: Live, backend: Backend) -> None:
    for number in range(4):
        send(fresh, f"ended-{number}")
    with (
        held_steps(client_of(backend), 5),
        fresh.http.stream("POST", PATH, json=ENDLESS) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert len(listed(fresh, status="running", limit=1)["data"]) == 1
        assert not listed(fresh, status="running", limit=1)["has_more"]
        assert listed(fresh, status="waiting") == {"object": "list", "data": [], "has_more": False}
        pages = read_all(fresh, 3, status="finished")
        assert pages == [["ended-3", "ended-2", "ended-1"], ["ended-0"]]
        assert read_all(fresh, 2, status="finished") == [["ended-3", "ended-2"], ["ended-1", "ended-0"]]


@pytest.mark.parametrize(("max_bytes", "num_pages"), [(1, 20), (2500, 7)])
def test_pages_are_bounded_by_bytes(
    fresh: Live, monkeypatch: pytest.MonkeyPatch, max_bytes: int, num_pages: int
) -> None:
    log_finished(fresh, 20)
    monkeypatch.setattr(routes, "MAX_PAGE_BYTES", max_bytes)
    seen, params, has_more = list[list[str]](), {"limit": "1000"}, True
    while has_more:
        response = fresh.http.get(LIST, params=params)
        seen.append(ids(response.json()))
        assert len(seen[-1]) == 1 or len(response.content) <= max_bytes + 50
        params["after"], has_more = seen[-1][-1], response.json()["has_more"]
    assert [name for page in seen for name in page] == [f"x{index}" for index in reversed(range(20))]
    assert len(seen) <= num_pages


def test_id_that_is_used_again_is_listed_once(fresh: Live) -> None:
    for name in ("again", "other", "again"):
        send(fresh, name)
    assert ids(listed(fresh)) == ["again", "other"]
    assert read_all(fresh, 1) == [["again"], ["other"]]


def test_unknown_and_foreign_ids_to_start_after_are_refused_alike(keyed: Live) -> None:
    send(keyed, "mine", "one")
    send(keyed, "foreign", "two")

    def refusal(name: str) -> tuple[int, str]:
        response = keyed.http.get(LIST, params={"after": name}, headers=bearer("one"))
        assert response.json()["error"]["param"] == "after"
        return response.status_code, response.text.replace(name, "NAME")

    assert refusal("foreign") == refusal("unknown")
    assert refusal("unknown")[0] == 400
    found = keyed.http.get(LIST, params={"after": "mine"}, headers=bearer("one")).json()
    assert found == {"object": "list", "data": [], "has_more": False}
    admin = keyed.http.get(LIST, params={"after": "foreign"}, headers=bearer("admin")).json()
    assert ids(admin) == ["mine"]


def test_administrators_see_the_latest_request_of_an_id_that_two_keys_use(keyed: Live) -> None:
    for key in ("one", "two", "one"):
        send(keyed, "same", key)
    send(keyed, "last", "two")
    pages = [
        keyed.http.get(LIST, params=params, headers=bearer("admin")).json()
        for params in ({"limit": "1"}, {"limit": "1", "after": "last"})
    ]
    assert [ids(page) for page in pages] == [["last"], ["same"]]
    assert pages[1]["data"][0]["tenant"] == "one"
    assert not pages[1]["has_more"]


def test_requests_are_listed_in_the_order_in_which_they_were_sent() -> None:
    log, caller = RequestLog(max_finished=2), Caller("one")
    opened = [LoggedRequest(str(i), caller, PATH, False, 0, "", lambda _: None) for i in range(5)]
    for logged in opened:
        log.open(logged)
    for index in (3, 0, 4):
        log.close(opened[index], "finished")
    assert [key[1] for key in latest_first(log.keys(), caller)] == ["4", "2", "1", "0"]  # 3 ended first
    assert latest_first(log.keys(), Caller("two")) == []
    again = LoggedRequest("0", caller, PATH, False, 0, "", lambda _: None)
    log.open(again)
    assert [key[1] for key in latest_first(log.keys(), caller)] == ["0", "4", "2", "1"]
    assert log.find(caller, "0") is again


def test_records_of_a_request_that_has_ended_are_packed() -> None:
    log = RequestLog(max_finished=2)
    logged = LoggedRequest("many", Caller(), PATH, False, 0, "", lambda _: None)
    log.open(logged)
    names = [f"many/{index}" for index in range(20)]
    log.set_engine_ids(logged, names)
    kept = [RequestRecord(name, "", 0, 7, 1.0, 2.0, num_output_tokens=3) for name in names[:-1]]
    for record in kept:
        log.answer_ended(logged, record)
    assert logged.first_without_record == names[-1]
    log.close(logged, "finished")
    assert list(logged.records.values()) == kept
    assert logged.first_without_record == names[-1]
    assert logged.num_output_tokens == 19 * 3
    seen, todo = list[Any](), list[Any]([logged.__dict__])
    while todo:
        item = todo.pop()
        if isinstance(item, dict | list | RequestRecord) and item not in seen:
            seen.append(item)
            todo += gc.get_referents(item)
    assert sum(isinstance(item, RequestRecord) for item in seen) == 1, "that of the slowest answer"


# ---- what a list costs others ----


def test_other_tasks_get_their_turn_after_each_slice_of_a_list(
    fresh: Live, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_finished(fresh, 10 * routes.SLICE)
    turns, described = 0, Counter[int]()  # requests that were described, by the turn of the other task
    describe = routes._slowest

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def spy(state: Any, logged: LoggedRequest) -> RequestState | None:
        described[turns] += 1
        return await describe(state, logged)

    monkeypatch.setattr(routes, "_slowest", spy)
    task = asyncio.run_coroutine_threadsafe(other(), backend.loop)
    try:
        assert len(listed(fresh, limit=1000)["data"]) == 10 * routes.SLICE
    finally:
        task.cancel()
    assert described.total() == 10 * routes.SLICE
    assert max(described.values()) <= routes.SLICE


@pytest.mark.parametrize("path", [LIST, f"{LIST}/mine"])
def test_lists_and_reports_count_against_the_limits_of_a_key(
    keyed: Live, backend: Backend, path: str
) -> None:
    send(keyed, "mine", "few")
    statuses = [keyed.http.get(path, headers=bearer("few")).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    body = {**ENDLESS, "request_id": "mine"}
    with (
        held_steps(client_of(backend), 5),
        keyed.http.stream("POST", PATH, json=body, headers=bearer("single")) as running,
    ):
        assert running.status_code == 200
        refused = keyed.http.get(path, headers=bearer("single"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert keyed.http.get(path, headers=bearer("admin")).status_code == 200  # which has no limits
        cancelled = keyed.http.delete(f"{LIST}/mine", headers=bearer("single")).json()
        assert cancelled["cancelled"], "what is running can be cancelled whatever the limits"
    keyed.wait_until_idle()
    assert keyed.http.get(path, headers=bearer("single")).status_code == 200
    assert not any(caller.num_running for caller in keyed.state.keys.callers)


def test_key_reads_one_list_at_a_time(keyed: Live) -> None:
    turns = keyed.state.report_turns.lock_of(keyed.state.keys.named("one"))
    keyed.backend.run(turns.acquire())
    with ThreadPoolExecutor(2) as threads:
        try:
            waiting = [
                threads.submit(httpx.get, f"{keyed.url}{path}", headers=bearer("one"), timeout=60)
                for path in (LIST, f"{LIST}/unknown")
            ]
            keyed.wait_until("both wait", lambda: keyed.state.keys.named("one").num_running == 2)
            assert keyed.http.get(LIST, headers=bearer("two")).status_code == 200
            assert keyed.http.get(LIST, headers=bearer("admin")).status_code == 200
            assert not any(future.done() for future in waiting)
        finally:
            keyed.backend.loop.call_soon_threadsafe(turns.release)
        assert [future.result().status_code for future in waiting] == [200, 404]


# ---- the report of one request ----


def test_report_has_its_answers_in_pages(fresh: Live) -> None:
    send(fresh, "many", n=20)
    path = f"{LIST}/many"
    whole = fresh.http.get(path).json()
    assert [answer["index"] for answer in whole["answers"]] == list(range(routes.DEFAULT_ANSWERS))
    assert whole["has_more"]
    assert whole["neighbours"] is not None
    rest = fresh.http.get(path, params={"after": 15}).json()
    assert [answer["index"] for answer in rest["answers"]] == [16, 17, 18, 19]
    assert not rest["has_more"]
    assert rest["neighbours"] is None
    assert rest["num_output_tokens"] == whole["num_output_tokens"] == 20 * 4
    assert len(fresh.http.get(path, params={"limit": 20}).json()["answers"]) == 20
    for params in ({"after": 20}, {"after": -1}, {"after": "x"}, {"limit": 0}, {"limit": 129}):
        refused = fresh.http.get(path, params=params)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == next(iter(params))


def test_report_pages_are_bounded_by_bytes(fresh: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    send(fresh, "many", n=5)
    monkeypatch.setattr(routes, "MAX_PAGE_BYTES", 1)
    indices = [
        [answer["index"] for answer in fresh.http.get(f"{LIST}/many", params=params).json()["answers"]]
        for params in ({}, *({"after": index} for index in range(5)))
    ]
    assert indices == [[0], [1], [2], [3], [4], []]


def test_recording_is_read_up_to_the_end_of_the_request_only(
    fresh: Live, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PAGE_BYTES", 1)
    read_timeline, num_pages = backend.engine.client.read_timeline, 0

    async def spy(query: TimelineQuery) -> TimelinePage:
        nonlocal num_pages
        num_pages += 1
        return await read_timeline(query)

    monkeypatch.setattr(backend.engine.client, "read_timeline", spy)
    send(fresh, "old")
    send(fresh, "later", max_tokens=2 * recorder.CHUNK.steps)
    fresh.http.get(f"{LIST}/old")
    assert num_pages >= 2
    num_pages = 0
    logged = fresh.state.request_log.find(Caller(), "old")
    assert logged.ended_at is not None
    logged.started_at, logged.ended_at = logged.started_at - 3600, logged.ended_at - 3600
    fresh.http.get(f"{LIST}/old")
    assert num_pages == 1


def test_neighbours_of_other_keys_have_no_numbers(keyed: Live, backend: Backend) -> None:
    rows = backend.core.scheduler.pool._free_rows
    kept = rows[:]
    rows[:] = rows[:1]
    try:
        culprit = {**ENDLESS, "request_id": "culprit"}
        with (
            ThreadPoolExecutor(1) as threads,
            held_steps(client_of(backend), 5) as held,
            keyed.http.stream("POST", PATH, json=culprit, headers=bearer("two")) as running,
        ):
            lines = running.iter_lines()
            next(lines)
            waiting = threads.submit(send, keyed, "victim", "one")
            keyed.wait_until("a waiting request", lambda: backend.core.scheduler.pool.num_waiting)
            held.allow(5)
            keyed.wait_until("steps that it waits for", held.has_stopped)
            keyed.http.delete(f"{LIST}/culprit", headers=bearer("two"))
            held.release()
            waiting.result()
    finally:
        keyed.wait_until_idle()
        rows[:] = kept
    (hidden,), (shown,) = (
        keyed.http.get(f"{LIST}/victim", headers=bearer(name)).json()["neighbours"]
        for name in ("one", "admin")
    )
    assert (hidden["id"], hidden["number"]) == (None, None)
    assert (shown["id"], shown["number"] is None) == ("culprit", False)
    assert hidden["why"] == shown["why"] == "queue"
    assert hidden["seconds"] == shown["seconds"] > 0
