"""`inflight serve --api-workers 2`: limits, requests and metrics hold across both processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.server.openai.responses.conversation import MAX_REPEATED_CHARACTERS
from tests.server.test_command import read_until_ready, started
from tests.support.processes import children
from tests.support.waiting import wait_until

SECONDS = 120.0
KEYS = """
keys:
  - {name: free, key: free-key}
  - {name: one, key: one-key, max_concurrent: 1}
  - {name: few, key: few-key, requests_per_minute: 3}
"""
GOOD = {"prompt": [5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
# Its clients disconnect before its end.
ENDLESS = {**GOOD, "max_tokens": 2000, "n": 16, "temperature": 1, "stream": True}


@dataclass
class TwoWorkers:
    process: subprocess.Popen[str]
    url: str
    connections: list[httpx.Client] = field(default_factory=list)

    @property
    def workers(self) -> list[int]:
        """Process ids."""
        return sorted(children(self.process.pid, "inflight.server.api_workers.worker"))

    def connect(self, key: str) -> httpx.Client:
        client = httpx.Client(
            base_url=self.url,
            timeout=SECONDS,
            limits=httpx.Limits(max_connections=1),
            headers={"authorization": f"Bearer {key}"},
        )
        self.connections.append(client)
        return client

    def to_each(self, key: str = "free-key") -> dict[int, httpx.Client]:
        """A connection to each API worker."""
        workers = wait_until(lambda: len(self.workers) == 2 and self.workers, "two API workers")
        clients: dict[int, httpx.Client] = {}
        while set(clients) != set(workers):
            http = self.connect(key)
            response = http.get("/version")
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            clients.setdefault(_owner(workers, httpx.URL(self.url).port, port), http)
        return clients

    def pair(self, key: str = "free-key") -> tuple[httpx.Client, httpx.Client]:
        first, second = self.to_each(key).values()
        return first, second


def _owner(process_ids: list[int], server_port: int | None, client_port: int) -> int:
    """Return the process that has the server's end of the connection between these ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [f"{server_port:04X}", f"{client_port:04X}"]
    (inode,) = (row[9] for row in rows if [end.rpartition(":")[2] for end in row[1:3]] == ends)
    for process_id in process_ids:
        for link in Path(f"/proc/{process_id}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(link) == f"socket:[{inode}]":
                    return process_id
    raise AssertionError("no API worker has the connection")


@pytest.fixture
def server(started_server: TwoWorkers) -> Iterator[TwoWorkers]:
    yield started_server
    while started_server.connections:
        started_server.connections.pop().close()


@pytest.fixture(scope="module")
def started_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWorkers]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    arguments = ("--api-workers", "2", "--in-process", "--keys", str(keys), "--admin-key", "the-admin-key")
    with started(*arguments, "--shutdown-timeout", "60", "--log-level", "warning") as process:
        said = read_until_ready(process)
        assert re.search(r"API workers +2 processes", said)
        yield TwoWorkers(process, re.findall(r"(https?://\S+)/metrics", said)[0])


def answered(http: httpx.Client, body: Any = GOOD, path: str = "/v1/completions") -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def is_taken(http: httpx.Client) -> bool:
    return http.post("/v1/completions", json=GOOD).status_code == 200


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def health(http: httpx.Client) -> Any:
    return http.get("/health").json()


def counts(http: httpx.Client, name: str, labels: str) -> float:
    values = re.findall(rf"^inflight:{name}_total\{{.*{labels}.*\}} (.*)$", http.get("/metrics").text, re.M)
    return sum(map(float, values))


def test_workers_give_the_same_answers_and_metrics_are_summed(server: TwoWorkers) -> None:
    first, second = server.pair()
    before = counts(first, "key_requests", 'key="free"')
    texts = {answered(http)["choices"][0]["text"] for http in (first, second, second)}
    assert len(texts) == 1
    for http in (first, second):
        assert counts(http, "key_requests", 'key="free"') == before + 3
        assert counts(http, "key_generation_tokens", 'key="free"') >= 24
        assert counts(http, "http_responses", 'route="/v1/completions",status="200"') >= 3
        assert re.search(r"^inflight:cache_config_info\{.*block_size=", http.get("/metrics").text, re.M)
    one, other = ({**GOOD, "temperature": 1, "max_tokens": 40} for _ in range(2))
    drawn = [answered(http, body)["choices"][0]["text"] for http, body in ((first, one), (second, other))]
    assert drawn[0] != drawn[1], "requests without a seed have the same one in both"


def test_limits_of_a_key_hold_across_workers(server: TwoWorkers) -> None:
    first, second = server.pair("one-key")
    with first.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()  # kept: the response closes with it
        next(lines)
        assert refusal(second.post("/v1/completions", json=GOOD)) == (429, "concurrency_limit_exceeded")
        assert refusal(second.post("/tokenize", json={"prompt": "x"})) == (429, "concurrency_limit_exceeded")
    wait_until(lambda: second.post("/v1/completions", json=GOOD).status_code == 200, "the end of it")
    first, second = server.pair("few-key")
    statuses = [http.post("/v1/completions", json=GOOD).status_code for http in (first, second) * 2]
    assert statuses == [200, 200, 200, 429]


def test_any_worker_reports_and_cancels_a_request(server: TwoWorkers) -> None:
    first, second = server.pair()
    (other, _) = server.pair("one-key")
    with first.stream("POST", "/v1/completions", json={**ENDLESS, "request_id": "mine"}) as response:
        lines = response.iter_lines()
        next(lines)
        body = {**GOOD, "request_id": "mine"}
        assert refusal(second.post("/v1/completions", json=body)) == (400, "request_id_in_use")
        assert second.get("/v1/requests/mine").json()["status"] == "running"
        assert other.get("/v1/requests/mine").status_code == 404
        assert httpx.get(f"{server.url}/v1/requests/mine").status_code == 401
        ended = second.delete("/v1/requests/mine").json()
        assert ended["cancelled"]
        assert ended["freed_blocks"] > 0
        assert '"finish_reason":"abort"' in "".join(lines)
    for http in server.pair():
        assert http.get("/v1/requests/mine").json()["status"] == "cancelled"
        assert refusal(http.get("/v1/requests/unknown")) == (404, "request_not_found")


def test_pages_of_a_list_cover_the_requests_of_all_workers_once(server: TwoWorkers) -> None:
    first, second = server.pair()
    admin, single = server.connect("the-admin-key"), server.connect("one-key")
    for number in range(6):
        answered((first, second)[number % 2], {**GOOD, "request_id": f"page-{number}"})
    answered(first, {**GOOD, "request_id": "page-1"})  # used again, and now the latest
    expected = ["page-1", "page-5", "page-4", "page-3", "page-2", "page-0"]
    for http in (first, second, admin):
        seen: list[str] = []
        while expected[-1] not in seen:
            params = {"limit": "4"} | ({"after": seen[-1]} if seen else {})
            page = http.get("/v1/requests", params=params).json()
            assert page["data"]
            seen += [item["id"] for item in page["data"]]
            answered(first, {**GOOD, "request_id": f"meanwhile-{len(seen)}"})
        assert [name for name in seen if name.startswith("page")] == expected
        assert len(seen) == len(set(seen))
    assert [item["id"] for item in first.get("/v1/requests?status=running").json()["data"]] == []
    refusals = {name: single.get("/v1/requests", params={"after": name}) for name in ("page-0", "unknown")}
    texts = {response.text.replace(name, "NAME") for name, response in refusals.items()}
    assert len(texts) == 1
    assert {refusal(response) for response in refusals.values()} == {(400, "invalid_value")}


def test_list_counts_once_against_a_key_whichever_workers_it_asks(server: TwoWorkers) -> None:
    first, second = server.pair("one-key")
    with first.stream("POST", "/v1/completions", json={**ENDLESS, "request_id": "single"}) as response:
        lines = response.iter_lines()  # kept: the response closes with it
        next(lines)
        for path in ("/v1/requests", "/v1/requests/single"):
            assert refusal(second.get(path)) == (429, "concurrency_limit_exceeded")
    wait_until(lambda: second.get("/v1/requests").status_code == 200, "its end")
    for http in (first, second):
        assert http.get("/v1/requests/single").status_code == 200


def shown_ids(http: httpx.Client, name: str) -> set[str | None]:
    """Return the ids on the timeline of the last minute, up to the request with this one."""
    ids: set[str | None] = set()
    with http.stream("GET", "/v1/steps", params={"since": -60}) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                ids |= {item.get("id") for item in json.loads(line[6:])["requests"]}
            if name in ids:
                return ids
    raise AssertionError("the stream ended")


def test_both_workers_show_the_same_timeline_and_requests(server: TwoWorkers) -> None:
    first, second = server.pair()
    for number, http in enumerate((first, second)):
        answered(http, {**GOOD, "request_id": f"shown-{number}"})
    names = {"shown-0", "shown-1"}
    for http in (first, second):
        assert names <= shown_ids(http, "shown-1")
        assert names <= {item["id"] for item in http.get("/v1/requests").json()["data"]}
    memories = [http.get("/v1/memory").json() for http in (first, second)]
    assert memories[0]["map"] == memories[1]["map"]
    admin = server.connect("the-admin-key")
    assert names <= shown_ids(admin, "shown-1")
    assert names <= {item["id"] for item in admin.get("/v1/requests").json()["data"]}
    for name in names:  # whichever worker has it
        assert admin.get(f"/v1/requests/{name}").json()["id"] == name
    assert admin.get("/v1/requests/unknown").status_code == 404
    for http in server.pair("one-key"):  # a key that may have one request at a time
        query: dict[str, str | int] = {"seconds": 600, "format": "recording"}
        # The first worker tells the main process that its trace has ended, but does not wait until that knows.
        while (trace := http.get("/v1/trace", params=query)).status_code == 429:
            assert trace.json()["error"]["type"] == "rate_limit_error"
        assert trace.status_code == 200
        assert all(name not in trace.text for name in names)
        assert any(any(chunk["steps"]["others"]) for chunk in trace.json()["chunks"])
    assert all(name in admin.get("/v1/trace", params={"seconds": 600}).text for name in names)
    other = server.connect("one-key")
    assert other.get("/v1/requests/shown-0").status_code == 404
    assert names.isdisjoint(item["id"] for item in other.get("/v1/requests").json()["data"])


def test_stored_response_is_continued_by_another_worker(server: TwoWorkers) -> None:
    first, second = server.pair()
    body = {"input": "Tell me of foxes.", "max_output_tokens": 4, "temperature": 0}
    stored = answered(first, body, "/v1/responses")
    path = f"/v1/responses/{stored['id']}"
    assert second.get(path).json() == stored
    more = answered(second, {**body, "previous_response_id": stored["id"]}, "/v1/responses")
    assert more["usage"]["input_tokens"] > stored["usage"]["input_tokens"]
    events = first.post("/v1/responses", json={**body, "stream": True}).text
    streamed = json.loads(events.strip().splitlines()[-1].removeprefix("data: "))["response"]
    assert second.get(f"/v1/responses/{streamed['id']}").json() == streamed
    assert second.delete(path).json()["deleted"]
    assert refusal(first.get(path)) == (404, "response_not_found")


def test_items_and_pages_are_found_by_every_worker(server: TwoWorkers) -> None:
    first, second = server.pair()
    body = {"input": "Why?", "max_output_tokens": 4, "temperature": 0}
    stored = answered(first, body, "/v1/responses")
    item = stored["output"][0]
    reference = {"type": "item_reference", "id": item["id"]}
    more = answered(
        second, {**body, "input": [reference, {"role": "user", "content": "And?"}]}, "/v1/responses"
    )
    page = first.get(f"/v1/responses/{more['id']}/input_items", params={"order": "asc"}).json()
    assert page["data"][0]["id"] == item["id"]
    assert (len(page["data"]), page["has_more"]) == (2, False)
    refused = second.post("/v1/responses", json={**body, "input": [{**reference, "id": "none"}]})
    assert refused.json()["error"]["code"] == "item_not_found"
    wrong = second.get(f"/v1/responses/{more['id']}/input_items", params={"after": "none"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


def test_unread_response_counts_against_its_key_in_every_worker(server: TwoWorkers) -> None:
    first, second = server.pair("one-key")
    wide = "\N{GRINNING FACE}"  # four bytes: the limit of what a response repeats counts characters
    body = {
        "input": "Why?",
        "max_output_tokens": 4,
        "prompt_cache_key": wide * (MAX_REPEATED_CHARACTERS - 1000),
    }
    path = f"/v1/responses/{answered(first, body, '/v1/responses')['id']}"
    url = httpx.URL(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.host, url.port or 0))
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one-key\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        for worker in (first, second):
            refused = worker.get(path)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
    wait_until(
        lambda: second.get(path).json().get("prompt_cache_key") == body["prompt_cache_key"],
        "the connection's end",
    )


def test_main_process_answers_for_the_engine(server: TwoWorkers) -> None:
    for http in server.pair():
        (only,) = http.get("/v1/replicas").json()["data"]
        assert only["state"] == "running"
        assert refusal(http.post("/v1/replicas")) == (401, "invalid_admin_key")
        admin = {"authorization": "Bearer the-admin-key"}
        assert refusal(http.post("/v1/replicas", headers=admin)) == (400, "no_replicas")
        assert refusal(http.get("/v1/replicas", headers={"authorization": "Bearer x"}))[0] == 401
        assert http.get("/ready").status_code == 200
        assert http.head("/health").content == b""


def test_sleep_and_wake_up_apply_to_all_workers(server: TwoWorkers) -> None:
    first, second = server.pair()
    admin = {"authorization": "Bearer the-admin-key"}
    assert refusal(first.post("/sleep")) == (401, "invalid_admin_key")
    with first.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()  # kept: the response closes with it
        next(lines)
        assert second.get("/load").json() == {"server_load": 1}
        assert refusal(second.post("/sleep", headers=admin)) == (409, "engine_busy")
    wait_until(lambda: first.get("/load").json() == {"server_load": 0}, "the end of it")
    wait_until(lambda: first.post("/sleep", headers=admin).status_code == 200, "sleep")
    for http in (first, second):
        assert http.get("/is_sleeping", headers=admin).json() == {"is_sleeping": True}
        assert http.get("/ready").json()["status"] == "sleeping"
        assert refusal(http.post("/v1/completions", json=GOOD)) == (503, "engine_asleep")
    assert second.post("/wake_up", headers=admin).status_code == 200
    for http in (first, second):
        assert http.get("/is_sleeping", headers=admin).json() == {"is_sleeping": False}
        assert answered(http)["usage"]["completion_tokens"] == 8


def test_dead_worker_loses_only_its_own_requests_and_is_restarted(server: TwoWorkers) -> None:
    by_process = server.to_each("one-key")
    (killed, first), (other, second) = by_process.items()
    before = counts(second, "key_requests", 'key="one"')
    with first.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()
        next(lines)
        assert health(second)["num_running"] > 0
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    wait_until(lambda: health(second)["num_running"] == 0, "an idle engine")
    assert answered(second)["usage"]["completion_tokens"] == 8
    wait_until(lambda: len(server.workers) == 2 and killed not in server.workers, "another in its place")
    for process_id, http in server.to_each("one-key").items():
        assert process_id != killed
        # The process that answered before frees the key's place a moment after its last byte.
        wait_until(partial(is_taken, http), "an answer")
    assert other in server.workers
    # Counts of the killed worker, up to about a second before its end, are still there.
    assert counts(second, "key_requests", 'key="one"') >= before + 3


def test_stream_finishes_after_the_signal_and_no_process_is_left(server: TwoWorkers) -> None:
    first, _ = server.pair()
    with first.stream("POST", "/v1/completions", json={**ENDLESS, "max_tokens": 300, "n": 1}) as response:
        lines = response.iter_lines()
        next(lines)
        workers = server.workers
        server.process.send_signal(signal.SIGHUP)  # as SIGTERM, which test_command.py sends
        wait_until(lambda: _refused(server.url), "no one listens")
        assert list(lines)[-2] == "data: [DONE]"
    assert server.process.wait(SECONDS) == 0
    assert not [process_id for process_id in workers if Path(f"/proc/{process_id}").exists()]


def _refused(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 503
    except httpx.TransportError:
        return True
