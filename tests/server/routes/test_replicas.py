"""A server with replicas: real processes of a small engine, listed and changed over HTTP."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight import AsyncEngine
from inflight.cli.main import main
from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.errors import ConfigError
from inflight.frontend.frontend import Frontend
from inflight.router import start as start_module
from inflight.router.router import Router
from inflight.router.start import start_router
from inflight.server.access.keys import Caller, Keys
from tests.engine.faulty import BUILD, SLOW
from tests.router.replicas import Script, process_id
from tests.server.chat_page import look
from tests.server.live import Backend, Live, live_server
from tests.support.browser import Page

ADMIN = {"authorization": "Bearer the-admin-key"}
LONG = {
    "prompt": [SLOW, 6],
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


class ReplicaBackend(Backend):
    max_restarts = 100

    async def _start(self, options: dict[str, Any]) -> AsyncEngine:
        config = EngineConfig.create(**options)
        process = ProcessConfig(heartbeat=0.05, max_restarts=self.max_restarts)
        client = await start_router(config, RouterConfig(replicas=2), process, build=BUILD)
        return AsyncEngine(Frontend.from_config(config, client.facts), client)

    @property
    def router(self) -> Router:
        assert isinstance(self.engine.client, Router)
        return self.engine.client


@pytest.fixture(scope="module")
def backend() -> Iterator[ReplicaBackend]:
    backend = ReplicaBackend(model="faulty")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def live(backend: ReplicaBackend) -> Iterator[Live]:
    with live_server(backend, admin_key="the-admin-key", api_key=("an-api-key",)) as live:
        live.http.headers["authorization"] = "Bearer an-api-key"
        yield live


def replicas(live: Live) -> dict[str, dict[str, Any]]:
    return {item["id"]: item for item in live.http.get("/v1/replicas").json()["data"]}


def states(live: Live) -> dict[str, str]:
    return {name: item["state"] for name, item in replicas(live).items()}


def until_running(live: Live, count: int) -> None:
    live.wait_until("replicas that run", lambda: len(live.state.model.replicas.available) == count)  # type: ignore[union-attr]


def kill_busy(backend: ReplicaBackend) -> str:
    """Kill the engine that has a request."""
    (busy,) = (replica for replica in backend.router.replicas.members if replica.requests)
    kill(backend, busy.replica_id)
    return busy.replica_id


def kill(backend: ReplicaBackend, replica_id: str) -> None:
    os.kill(process_id(backend.router.replicas.find(replica_id).client), signal.SIGKILL)


def test_stream_survives_its_engine_and_the_report_says_so(live: Live, backend: ReplicaBackend) -> None:
    whole = live.complete(**LONG)
    live.wait_until_idle()
    lines: list[str] = []
    with live.http.stream(
        "POST", "/v1/completions", json={**LONG, "stream": True, "request_id": "outlives"}
    ) as response:
        for line in response.iter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
                if len(lines) == 1:  # of tokens that come faster than they are read, several are in one
                    killed = kill_busy(backend)
    assert lines[-1] == "[DONE]"
    tokens = [httpx.Response(200, text=line).json()["choices"][0]["token_ids"] for line in lines[:-1]]
    assert [token for part in tokens for token in part] == whole["choices"][0]["token_ids"]
    report = live.http.get("/v1/requests/outlives").json()
    (answer,) = report["answers"]
    assert (answer["replica"], answer["num_failovers"]) == ({"0": "1", "1": "0"}[killed], 1)
    assert answer["num_output_tokens"] == 200
    assert answer["breakdown"]["lost"] > 0
    assert "lost to an engine that died, until another took over" in report["why"]
    listed = live.http.get("/v1/requests").json()["data"]
    (summary,) = [item for item in listed if item["id"] == "outlives"]
    assert (summary["num_output_tokens"], summary["why"]) == (200, report["why"])
    health = live.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["degraded"] in ([f"replica {killed} is restarting"], [])
    until_running(live, 2)
    assert live.http.get("/health").json()["degraded"] == []
    metrics = live.http.get("/metrics").text
    assert re.search(rf'replica_restarts_total\{{.*replica="{killed}"\}} 1\.0', metrics)
    assert len(re.findall(r"^inflight:replica_up\{.*\} 1\.0$", metrics, re.M)) == 2
    total = re.search(r"^inflight:generation_tokens_total\{.*\} (.*)$", metrics, re.M)
    assert total is not None
    assert float(total[1]) > 300


def test_listing_needs_a_key_and_changing_needs_the_admin_key(live: Live) -> None:
    assert live.http.get("/v1/replicas", headers=ADMIN).status_code == 200
    assert live.http.get("/v1/replicas").json()["routing"] == "prefix_aware"
    assert live.http.get("/v1/replicas", headers={"authorization": "Bearer x"}).status_code == 401
    for method, path in (
        ("POST", "/v1/replicas"),
        ("POST", "/v1/replicas/roll"),
        ("POST", "/v1/replicas/0/drain"),
        ("DELETE", "/v1/replicas/0"),
    ):
        refused = live.http.request(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert live.http.post("/v1/completions", json=LONG, headers=ADMIN).status_code == 401
    for method, path in (("POST", "/v1/replicas/9/drain"), ("DELETE", "/v1/replicas/9")):
        missing = live.http.request(method, path, headers=ADMIN)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "replica_not_found")


def test_commands_add_and_remove_replicas(
    live: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*arguments: str) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", ["inflight", "replicas", *arguments, "--url", live.url])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        assert not exit_.value.code, captured.err
        return [re.split(r"\s{2,}", line) for line in captured.out.splitlines()]

    monkeypatch.setenv("INFLIGHT_ADMIN_KEY", "the-admin-key")
    until_running(live, 2)
    assert [row[:2] for row in command("add")[1:]] == [["0", "running"], ["1", "running"], ["2", "running"]]
    assert [row[1] for row in command("drain", "0")[1:]] == ["draining", "running", "running"]
    assert live.http.get("/health").json()["degraded"] == ["replica 0 is draining"]
    assert [row[0] for row in command("remove", "0")[1:]] == ["1", "2"]
    assert [row[0] for row in command("restart", "1")[1:]] == ["1", "2"]
    command("remove", "1")
    assert states(live) == {"2": "running"}
    monkeypatch.setattr(sys, "argv", ["inflight", "replicas", "remove", "2", "--url", live.url])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "is the last one that takes requests" in capsys.readouterr().err
    before = [replica.client.process_id for replica in live.state.model.replicas.members]  # type: ignore[union-attr]
    command("add")
    command("roll")
    assert sorted(states(live).values()) == ["running", "running"]
    after = [replica.client.process_id for replica in live.state.model.replicas.members]  # type: ignore[union-attr]
    assert not set(before) & set(after)
    assert live.complete(**LONG)["usage"]["completion_tokens"] == 200


class ImpatientBackend(ReplicaBackend):
    max_restarts = 1


def test_failed_restart_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path / "script")
    script.say("weights:old")
    with (
        closing(ImpatientBackend(model=script.model)) as backend,
        live_server(backend, admin_key="the-admin-key") as live,
    ):

        def change(path: str) -> tuple[int, str]:
            response = live.http.post(f"/v1/replicas{path}", headers=ADMIN)
            return response.status_code, response.json().get("error", {}).get("code", "")

        def degraded() -> list[str]:
            health = live.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "ok")
            found: list[str] = health.json()["degraded"]
            return found

        script.say("weights:new")
        assert change("/roll") == (400, "checkpoint_changed")
        script.say("raise")
        assert change("/0/restart") == (503, "replica_not_started")
        assert (degraded(), states(live)) == ([], {"0": "running", "1": "running"})
        monkeypatch.setattr(start_module, "available_memory", lambda: 0)
        assert change("/0/restart") == (503, "replica_not_started")
        assert degraded() == ["replica 0 is dead"]
        assert change("/1/restart") == (400, "last_replica")
        script.say("weights:old")
        assert change("/0/restart") == (200, "")
        assert degraded() == []
        script.say("hang")
        kill(backend, "1")
        live.wait_until("a restart", lambda: backend.router.replicas.find("1").state == "restarting")
        assert degraded() == ["replica 1 is restarting"]
        assert change("/roll") == (400, "replica_missing")
        assert live.complete(**LONG)["usage"]["completion_tokens"] == 200


def test_single_engine_is_listed_and_cannot_be_changed(llm_server: Live) -> None:
    (only,) = replicas(llm_server).values()
    assert (only["id"], only["state"]) == ("0", "running")
    refused = llm_server.http.post("/v1/replicas", headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_disabled")


@pytest.fixture
def llm_server(live: Live) -> Iterator[Live]:
    """A server without a router, which asks the same engines for nothing."""
    with live_server(_OneEngine(live.backend)) as found:
        yield found


class _OneEngine(Backend):
    """One of the replicas, alone."""

    def __init__(self, backend: Backend) -> None:
        router = backend.engine.client
        assert isinstance(router, Router)
        self.loop = backend.loop
        self.engine = AsyncEngine(backend.engine.frontend, router.replicas.members[0].client)


@pytest.mark.parametrize("key", ["", " x", "ä"])
def test_admin_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="admin_key"):
        Keys().set_admin(key)
    with pytest.raises(ConfigError, match="also an API key"):
        Keys([("same", Caller("of the keys file"))]).set_admin("same")


def test_page_shows_each_replica(page: Page, live: Live, backend: ReplicaBackend) -> None:
    until_running(live, 2)
    page.open(f"{live.url}/replicas")
    page.wait_for("document.querySelector('#notice').innerText.includes('API key')")
    assert not page.text("#summary")
    page.run("document.querySelector('#key').focus()")
    page.write("an-api-key")
    page.press("Tab")
    page.wait_for("document.querySelectorAll('#replicas li').length === 2")
    page.excuse("401")
    assert page.text("#summary") == "2 replicas behind a router (prefix aware): all are running."
    assert not page.text("#notice")
    with live.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 4000, "stream": True}):
        page.wait_for("[...document.querySelectorAll('dd')].some((one) => one.innerText === '1')")
        look(page, "replicas")
        kill_busy(backend)
        restarts = "[...document.querySelectorAll('dd:last-child')].map((one) => Number(one.innerText))"
        page.wait_for(f"{restarts}.some((count) => count > 0)")
    until_running(live, 2)
    drained = backend.router.replicas.members[0]
    drained.draining = True
    words = f"replica {drained.replica_id} takes no new requests"
    page.wait_for(f"document.querySelector('#summary').innerText.includes('{words}')")
    drained.draining = False
    page.wait_for("document.querySelector('#summary').innerText.includes('all are running')")
    live.wait_until_idle()
    page.leave()
