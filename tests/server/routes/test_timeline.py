"""/v1/steps, /v1/requests, /v1/memory and /v1/trace on a real server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from inflight.engine.inproc import InprocClient
from inflight.engine.remote.process_client import ProcessClient
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.routes import timeline as routes
from inflight.server.state import SERVICE_THREADS
from tests.server.faults.cases import process_id
from tests.server.faulty import HANG, hold_file
from tests.server.live import Backend, Live, ProcessBackend, live_server
from tests.timeline.cells import cells_of

BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
KEYS = """
keys:
  - {name: one, key: one-key}
  - {name: two, key: two-key}
"""


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    lines = response.iter_lines()
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def read_until_finished(
    live: Live, request_id: str, body: dict[str, Any] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Return the chunks of a stream up to the one in which a request finishes; with a body, send it meanwhile."""
    read = []
    live.wait_until("no other viewer", lambda: not viewers_of(live))
    with ThreadPoolExecutor(1) as threads, live.http.stream("GET", "/v1/steps", **options) as response:
        assert response.status_code == 200, response.read()
        if body is not None:
            live.wait_until("a viewer", lambda: viewers_of(live))
            threads.submit(live.post, "/v1/completions", {**body, "request_id": request_id})
        assert response.headers["content-type"].startswith("text/event-stream")
        numbers: set[int] = set()
        for chunk in chunks(response):
            read.append(chunk)
            numbers |= {item["number"] for item in chunk["requests"] if item.get("id") == request_id}
            ended = {event["request"] for event in chunk["events"] if event["type"] == "finish"}
            if numbers and numbers <= ended:
                return read
    raise AssertionError("the stream ended")


def viewers_of(live: Live) -> list[Any]:
    client = live.backend.engine.client
    assert isinstance(client, InprocClient | ProcessClient)
    return client._timeline_observers


@pytest.fixture(scope="module", params=["thread", "process"])
def watched(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Live]:
    own = ProcessBackend(num_blocks=256) if request.param == "process" else None
    with live_server(own or backend) as live:
        yield live
        live.wait_until_idle()
    if own is not None:
        own.close()


def test_stream_shows_every_token_of_a_request(watched: Live) -> None:
    read = read_until_finished(watched, "shown", BODY)
    (info,) = [item for chunk in read for item in chunk["requests"] if item.get("id") == "shown"]
    assert info["route"] == "/v1/completions"
    assert info["prompt_tokens"] == 3
    assert "text" not in info
    cells = [
        cell
        for cell in cells_of(run for chunk in read for run in chunk["runs"])
        if cell.request == info["number"]
    ]
    assert sum(cell.outputs for cell in cells) == 12
    assert len({cell.step for cell in cells}) == len(cells), "each step once"
    types = [
        event["type"] for chunk in read for event in chunk["events"] if event["request"] == info["number"]
    ]
    assert types == ["arrive", "admit", "finish"]


def test_page_opened_late_gets_the_past(watched: Live) -> None:
    began = time.time()
    watched.post("/v1/completions", {**BODY, "request_id": "past"})
    read = read_until_finished(watched, "past", params={"since": began})
    numbers = [number for chunk in read for number in chunk["steps"]["step"]]
    assert numbers == sorted(set(numbers)), "no step comes twice"
    assert all(at >= began for chunk in read for at in chunk["steps"]["at"])
    assert read_until_finished(watched, "past", params={"since": -60})


def test_past_and_present_join_without_a_gap(watched: Live) -> None:
    body = {**BODY, "prompt": [HANG, 6, 7], "max_tokens": 300, "request_id": "long"}
    with ThreadPoolExecutor(2) as threads, ExitStack() as held:
        if isinstance(watched.backend, ProcessBackend):  # its third token comes when the file is gone
            file = hold_file(process_id(watched))
            held.callback(file.unlink)
            is_holding = file.exists
        else:
            steps = held.enter_context(watched.backend.held_steps(3))
            is_holding = steps.has_stopped
        threads.submit(watched.post, "/v1/completions", body)
        watched.wait_until("its first tokens", is_holding)
        reading = threads.submit(read_until_finished, watched, "long", params={"since": -60})
        watched.wait_until("a viewer", lambda: viewers_of(watched))
        held.close()
        read = reading.result()
    numbers = [number for chunk in read for number in chunk["steps"]["step"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_nothing_leaves_the_engine_while_no_one_watches(live: Live) -> None:
    read_until_finished(live, "w", BODY)
    live.wait_until("no viewer", lambda: not live.state.viewers.total())
    live.wait_until("an engine that no one watches", lambda: not live.backend.core.recorder.is_watched)


@pytest.mark.parametrize(
    ("path", "param"),
    [("/v1/steps?since=x", "since"), ("/v1/trace?seconds=0", "seconds"), ("/v1/trace?format=svg", "format"),
     ("/v1/requests?status=gone", "status"), ("/v1/requests?limit=0", "limit"), ("/v1/memory?replica=9", "replica")],
)  # fmt: skip
def test_invalid_parameters_are_refused(live: Live, path: str, param: str) -> None:
    response = live.http.get(path)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def bearer(*keys: str) -> list[dict[str, str]]:
    return [{"authorization": f"Bearer {key}"} for key in keys]


@pytest.fixture
def two_keys(backend: Backend, tmp_path: Path) -> Iterator[Live]:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    with live_server(backend, keys=str(keys), admin_key="the-admin", timeline_text=True) as live:
        yield live
        live.wait_until_idle()


def test_each_key_has_its_own_places_for_viewers(two_keys: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_VIEWERS", 1)
    live, (one, two, admin) = two_keys, bearer("one-key", "two-key", "the-admin")
    with live.http.stream("GET", "/v1/steps", headers=one) as response:
        lines = response.iter_lines()  # kept: the response closes with it
        assert next(lines) == ": connected"
        refused = live.http.get("/v1/steps", headers=one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
        for headers in (two, admin):
            with live.http.stream("GET", "/v1/steps", headers=headers) as other:
                assert other.status_code == 200
    live.wait_until("no viewer", lambda: not live.state.viewers.total())
    with live.http.stream("GET", "/v1/steps", headers=one) as response:
        assert response.status_code == 200


def test_place_is_taken_before_the_first_byte_and_left_before_the_last(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_VIEWERS", 1)
    num_viewers: list[int] = []

    async def open_twice() -> str | None:
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(_: Message) -> None:
            num_viewers.append(live.state.viewers.total())
            has_begun.set()
            await may_end.wait()

        async def piece() -> AsyncGenerator[bytes]:
            yield b"piece"

        def stream() -> routes.AdmittedStream:
            return routes.AdmittedStream(routes._viewing(live.state, Caller()), piece())

        first = asyncio.ensure_future(stream()({"type": "http"}, receive, send))
        await has_begun.wait()
        with pytest.raises(ApiError) as refusal:
            await stream()({"type": "http"}, receive, send)
        may_end.set()
        await first
        return refusal.value.code

    assert live.backend.run(open_twice()) == "too_many_viewers"
    assert num_viewers == [1, 1, 0], "with the headers, a piece, and the end"


class BusyThreads:
    """Keeps the threads busy that write traces."""

    def __init__(self, live: Live) -> None:
        self._may_end = threading.Event()
        for _ in range(SERVICE_THREADS):
            live.state.service_threads.submit(self._may_end.wait)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._may_end.set()


def test_keys_write_one_trace_at_a_time(two_keys: Live) -> None:
    live, (one, two) = two_keys, bearer("one-key", "two-key")
    with ThreadPoolExecutor() as pool:
        with BusyThreads(live):
            first = pool.submit(live.http.get, "/v1/trace", headers=one)
            live.wait_until("a trace", lambda: live.state.tracing == {"one"})
            refused = live.http.get("/v1/trace", headers=one)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_traces")
            second = pool.submit(live.http.get, "/v1/trace", headers=two)
            live.wait_until("another key's trace", lambda: live.state.tracing == {"one", "two"})
        assert [trace.result().status_code for trace in (first, second)] == [200, 200]
    assert live.http.get("/v1/trace", headers=one).status_code == 200


def test_trace_counts_against_the_limits_of_its_key(backend: Backend, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: one, key: one-key, max_concurrent: 1}\n  - {name: two, key: two-key}\n"
    )
    with live_server(backend, keys=str(keys), admin_key="the-admin") as live, ThreadPoolExecutor() as pool:
        one, admin = bearer("one-key", "the-admin")
        with BusyThreads(live):
            trace = pool.submit(live.http.get, "/v1/trace", headers=one)
            live.wait_until("a trace", lambda: live.state.tracing == {"one"})
            refused = live.post("/v1/completions", BODY, headers=one)
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert trace.result().status_code == 200
        assert live.post("/v1/completions", BODY, headers=one).status_code == 200
        assert live.http.get("/v1/trace", headers=admin).status_code == 200


def test_trace_of_a_client_that_leaves_does_not_count(two_keys: Live) -> None:
    live, (one,) = two_keys, bearer("one-key")
    with BusyThreads(live), live.http.stream("GET", "/v1/trace", headers=one) as response:
        assert response.status_code == 200
        assert live.state.tracing == {"one"}
        response.close()
        live.wait_until("no trace", lambda: not live.state.tracing)
    assert live.http.get("/v1/trace", headers=one).status_code == 200


def test_open_stream_does_not_delay_the_shutdown(backend: Backend) -> None:
    with live_server(backend) as live, live.http.stream("GET", "/v1/steps") as response:
        lines = response.iter_lines()  # kept: the response closes with it
        assert next(lines) == ": connected"
        live.stop()


def test_keys_see_their_own_requests_and_the_slots_of_others(two_keys: Live) -> None:
    live, (one, two, admin) = two_keys, bearer("one-key", "two-key", "the-admin")
    began = time.time()
    text = {**BODY, "prompt": "Once upon a time", "request_id": "hidden-one"}
    assert live.post("/v1/completions", text, headers=one).status_code == 200
    assert live.post("/v1/completions", {**BODY, "request_id": "second"}, headers=two).status_code == 200
    read = {
        name: read_until_finished(live, "second", headers=headers, params={"since": began})
        for name, headers in (("two", two), ("admin", admin))
    }
    requests, events, runs = (
        {name: [item for chunk in read[name] for item in chunk[items]] for name in read}
        for items in ("requests", "events", "runs")
    )
    others = {name: [count for chunk in read[name] for count in chunk["steps"]["others"]] for name in read}
    (own,) = requests["two"]
    assert (own["id"], own["key"]) == ("second", "two")
    assert {event["request"] for event in events["two"]} == {run[1] for run in runs["two"]} == {own["number"]}
    assert others["two"].count(1) >= 12, "the slot of the other key's request"
    assert set(others["admin"]) == {0}
    shown = {item["id"]: item for item in requests["admin"]}
    assert shown.keys() == {"hidden-one", "second"}
    assert shown["hidden-one"]["text"] == "Once upon a time"
    hidden = shown["hidden-one"]["number"]
    for form in ("trace", "recording"):
        trace = live.http.get("/v1/trace", params={"seconds": 60, "format": form}, headers=two)
        assert "hidden-one" not in trace.text
        assert "Once upon" not in trace.text
        assert "second" in trace.text
        assert hidden not in set(numbers_in(trace.json(), {"request", "number"}))
        assert "hidden-one" in live.http.get("/v1/trace", params={"format": form}, headers=admin).text
    listed = live.http.get("/v1/requests", headers=admin).json()["data"]
    assert {item["id"] for item in listed} == {"hidden-one", "second"}
    assert [item["id"] for item in live.http.get("/v1/requests", headers=two).json()["data"]] == ["second"]
    for path in ("/v1/steps", "/v1/requests", "/v1/requests/second", "/v1/memory", "/v1/trace"):
        assert live.http.get(path).status_code == 401
    for headers, status in ((admin, 200), (one, 200), (two, 404)):
        assert live.http.get("/v1/requests/hidden-one", headers=headers).status_code == status
    assert live.http.delete("/v1/requests/hidden-one", headers=admin).status_code == 401
    assert live.http.get("/v1/memory", headers=admin).status_code == 200


def numbers_in(value: Any, names: set[str]) -> Iterator[int]:
    """Yield the values of these fields, however deep they are."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if name in names and isinstance(item, int):
            yield item
        yield from numbers_in(item, names)


def test_all_keys_without_a_name_see_everything(backend: Backend) -> None:
    with live_server(backend, api_key=("a-key", "b-key")) as live:
        first, second = bearer("a-key", "b-key")
        live.post("/v1/completions", {**BODY, "request_id": "shared"}, headers=first)
        read = read_until_finished(live, "shared", headers=second, params={"since": -60})
        assert {number for chunk in read for number in chunk["steps"]["others"]} == {0}
        assert routes._reader(live.state, Caller()) is None


def test_requests_are_listed_by_status_latest_first(live: Live) -> None:
    for name in ("early", "late"):
        live.post("/v1/completions", {**BODY, "request_id": name})
    finished = live.http.get("/v1/requests", params={"status": "finished", "limit": 2}).json()
    assert [item["id"] for item in finished["data"]] == ["late", "early"]
    assert live.http.get("/v1/requests/late").json()["answers"][0]["number"] >= 0
    assert live.http.get("/v1/requests?status=running").json()["data"] == []


def test_causes_of_a_finished_request_add_up_to_its_latency(live: Live) -> None:
    threads = [
        threading.Thread(
            target=live.post, args=("/v1/completions", {**BODY, "request_id": f"sum{index}", "n": 2})
        )
        for index in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [
        answer for index in range(8) for answer in live.http.get(f"/v1/requests/sum{index}").json()["answers"]
    ]
    numbers = {answer["number"] for answer in answers}
    with live.http.stream("GET", "/v1/steps", params={"since": -60}) as response:
        ends: dict[int, float] = {}
        begins: dict[int, float] = {}
        for chunk in chunks(response):
            begins |= {item["number"]: item["arrived"] for item in chunk["requests"]}
            ends |= {event["request"]: event["at"] for event in chunk["events"] if event["type"] == "finish"}
            if numbers <= ends.keys():
                break
    for answer in answers:
        parts = answer["breakdown"]
        total = sum(parts.pop("queue").values()) + sum(parts.values())
        latency = ends[answer["number"]] - begins[answer["number"]]
        assert total == pytest.approx(latency, rel=0.01, abs=1e-5)


def test_memory_map_accounts_for_every_block(live: Live) -> None:
    live.post("/v1/completions", {**BODY, "prompt": list(range(100))})
    found = live.http.get("/v1/memory").json()
    counts: dict[int, int] = {}
    for value, count in found["map"]:
        counts[value] = counts.get(value, 0) + count
    assert sum(counts.values()) == found["num_blocks"] == 2048
    assert counts[0] >= 6
    assert counts[-1] + counts[0] == 2048
    assert set(found["evict_next"])
    assert len(found["evict_next"]) <= 64


def test_trace_of_a_server_has_its_requests(live: Live) -> None:
    live.post("/v1/completions", {**BODY, "request_id": "traced"})
    response = live.http.get("/v1/trace", params={"seconds": 60})
    assert response.headers["content-encoding"] == "gzip"
    names = {event["name"] for event in response.json()["traceEvents"]}
    assert {"traced", "queued", "running", "KV blocks", "tokens/s", "decode traced"} <= names
    recording = live.http.get("/v1/trace", params={"seconds": 60, "format": "recording"}).json()
    assert recording["object"] == "recording"
    assert recording["chunks"]


def send_while_first_decodes(live: Live, *requests: tuple[dict[str, Any], dict[str, str]]) -> None:
    """Send two requests with their headers, the second when the first has a token, and wait for their answers."""
    client = live.backend.engine.client

    async def is_waiting() -> bool:
        return (await client.stats()).num_waiting == 1

    with ThreadPoolExecutor(2) as threads:
        with live.backend.held_steps(20) as held:
            (body, headers), (later_body, later_headers) = requests
            first = threads.submit(live.post, "/v1/completions", body, headers=headers)
            live.wait_until("its first tokens", held.has_stopped)
            second = threads.submit(live.post, "/v1/completions", later_body, headers=later_headers)
            live.wait_until("the second in the queue", is_waiting)
        assert {first.result().status_code, second.result().status_code} == {200}


def test_neighbours_have_ids_only_for_their_owner_and_the_admin(backend: Backend, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    with live_server(backend, keys=str(keys), admin_key="the-admin") as live:
        one, two, admin = ({"authorization": f"Bearer {key}"} for key in ("one-key", "two-key", "the-admin"))
        long = {**BODY, "max_tokens": 400, "request_id": "victim"}
        prompt = {**BODY, "prompt": list(range(1, 900)), "max_tokens": 1, "request_id": "culprit"}
        send_while_first_decodes(live, (long, one), (prompt, two))
        named = {
            name: live.http.get("/v1/requests/victim", headers=headers).json()["neighbours"][0]["id"]
            for name, headers in (("owner", one), ("admin", admin))
        }
        assert named == {"owner": None, "admin": "culprit"}


def test_neighbour_with_a_long_prompt_is_named(live: Live) -> None:
    prompt = {**BODY, "prompt": list(range(1, 900)), "max_tokens": 1, "request_id": "culprit"}
    send_while_first_decodes(live, ({**BODY, "max_tokens": 400, "request_id": "victim"}, {}), (prompt, {}))
    report = live.http.get("/v1/requests/victim").json()
    assert report["neighbours"][0]["id"] == "culprit"
    assert report["neighbours"][0]["why"] == "prompt"
    assert report["neighbours"][0]["seconds"] > 0
