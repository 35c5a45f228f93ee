"""A server answers 503 while its model loads, and serves on the same socket afterwards."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from inflight.server.app import LoadingApp
from tests.server.test_command import read_until_ready, started, worker_of
from tests.server.waiting import POLICY, VARIABLE
from tests.support.processes import exists
from tests.support.waiting import wait_until

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5, 6], "max_tokens": 4}
TLS = Path(__file__).parent / "tls"  # a certificate made for this test alone
TRUSTED = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
TLS_FILES = ("--ssl-keyfile", str(TLS / "key.pem"), "--ssl-certfile", str(TLS / "cert.pem"))


def client_of(loading_app: LoadingApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(loading_app), base_url="http://localhost")


def check_refusal(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("service_unavailable_error", "loading", None)


async def test_loading_server_answers_503() -> None:
    loading_app = LoadingApp()
    async with client_of(loading_app) as http:
        for path in ("/health", "/ready"):
            response = await http.get(path)
            assert response.status_code == (await http.head(path)).status_code == 503
            assert (response.json()["status"], response.json()["progress"]) == ("loading", None)
            assert int(response.headers["retry-after"]) > 0
            check_refusal(await http.post(path))
        for path in ("/", "/metrics", "/version", "/openapi.json", "/v1/models", "/nothing", "/health/"):
            check_refusal(await http.get(path))
        check_refusal(await http.post(COMPLETIONS, json=BODY))


async def test_loading_server_sends_browsers_a_page_that_waits() -> None:
    async with client_of(LoadingApp()) as http:
        response = await http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "The model is loading" in response.text
        check_refusal(await http.get("/v1/models", headers={"accept": "text/html"}))


async def test_health_reports_loading_progress() -> None:
    loading_app = LoadingApp()
    async with client_of(loading_app) as http:
        loading_app.progress(25, 100)
        assert (await http.get("/health")).json()["progress"] == 0.25
        loading_app.progress(0, 0)  # of a model without weights
        assert (await http.get("/ready")).json()["progress"] is None


async def test_application_takes_over_once_loaded() -> None:
    loading_app = LoadingApp()
    async with client_of(loading_app) as http:
        check_refusal(await http.get("/"))
        loading_app.open(PlainTextResponse("it is open"))
        for path in ("/", "/health"):
            assert (await http.get(path)).text == "it is open"


# ---- the command ----


@contextmanager
def loading(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server that loads until a file exists; yield its process and a client."""
    with started("--policy", POLICY, "--log-level", "debug", *arguments) as process:
        assert process.stderr is not None
        said = ""
        while (address_line := re.search(r"listening on (\S+), port (\d+)", said)) is None:
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said = line
        address = (
            f"{'https' if '--ssl-certfile' in arguments else 'http'}://{address_line[1]}:{address_line[2]}"
        )
        with httpx.Client(base_url=address, timeout=60, verify=TRUSTED) as http:
            yield process, http


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lets models be loaded once it exists."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "go"))
    return tmp_path / "go"


@pytest.mark.parametrize(
    ("arguments", "number"),
    [((), signal.SIGHUP), (("--in-process", "--api-key", "secret", *TLS_FILES), signal.SIGTERM)],
    ids=["process", "TLS"],
)
def test_server_listens_while_it_loads_and_then_serves(
    arguments: tuple[str, ...], number: signal.Signals, file: Path
) -> None:
    with loading(*arguments) as (process, http):
        assert http.get("/health").json()["status"] == "loading"
        check_refusal(http.post(COMPLETIONS, json=BODY))
        file.touch()
        assert str(http.base_url) in read_until_ready(process)
        assert http.get("/ready").status_code == 200  # as soon as it has said so
        headers = {"authorization": "Bearer secret"}
        assert http.post(COMPLETIONS, json=BODY, headers=headers).status_code == 200
        if http.base_url.scheme == "https":
            with pytest.raises(httpx.ConnectError):  # of someone who does not trust the certificate
                httpx.get(f"{http.base_url}/health")
        process.send_signal(number)  # a connection is still open, but idle
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert "ERROR" not in process.stderr.read()


@pytest.mark.parametrize(
    ("in_process", "number"),
    [(False, signal.SIGINT), (False, signal.SIGHUP), (True, signal.SIGTERM)],
)
def test_signal_while_loading_stops_the_server(in_process: bool, number: signal.Signals, file: Path) -> None:
    with loading(*(["--in-process"] if in_process else [])) as (process, http):
        assert http.get("/ready").status_code == 503
        worker = None if in_process else worker_of(process)
        process.send_signal(number)
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert not file.exists()
    if worker is not None:
        wait_until(lambda: not exists(worker), "the worker's end")


def test_loading_server_holds_its_address(file: Path) -> None:
    with loading() as (_, http), started("--port", str(http.base_url.port)) as second:
        assert second.wait(120) == 1
        assert second.stderr is not None
        assert "Address already in use (choose another with --port)" in second.stderr.read()
    assert not file.exists()


def test_model_that_cannot_be_loaded_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with started(str(tmp_path)) as process:
        assert process.wait(120) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.startswith("inflight: ")
    assert len(said.splitlines()) == 1
