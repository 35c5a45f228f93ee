"""`inflight serve` as a process, with the engine in another."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from inflight import LLM, SamplingParams, __version__
from inflight.cli.main import main
from inflight.server import run as run_module
from tests.support.processes import children
from tests.support.waiting import wait_until

PATH = "/v1/completions"
BASE_URLS = {
    "OpenAI API": "/v1",
    "Anthropic API": "",
    "Chat page": "/",
    "Metrics": "/metrics",
    "Health": "/health",
}
GOOD = {"prompt": [5, 6], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, from its first moment on."""
    command = [
        *(sys.executable, "-m", "inflight.cli.main", "serve"),
        *("--port", "0", "--num-blocks", "1024"),
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until_ready(process: subprocess.Popen[str]) -> str:
    """Return what the server prints up to the end of its banner."""
    assert process.stderr is not None
    said = ""
    while said.count("curl") < 2:
        line = process.stderr.readline()
        assert line, f"it ended: {said}"
        said += line
    return said


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, str]]:
    """Start a server; yield its process, a client and what it printed until it was ready."""
    with started(*arguments) as process:
        said = read_until_ready(process)
        url = re.findall(r"(http://\S+)/metrics", said)[0]
        with httpx.Client(base_url=url, timeout=60) as http:
            yield process, http, said


def test_stream_finishes_after_a_signal_and_the_server_exits_cleanly(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_QWERTY", "1")
    arguments = ("--shutdown-timeout", "60", "--log-format", "json", "--trust-remote-code")
    with serving(*arguments) as (process, http, said):
        assert "inflight-builtin (bfloat16, context length 4,096)" in said
        assert "1,024 blocks of 16 tokens = 16,384 tokens" in said
        assert "4 of full context length" in said
        assert "its own process" in said
        base = str(http.base_url).rstrip("/")
        for name, url in BASE_URLS.items():
            assert re.search(rf"{name} +{re.escape(base + url)}(\\n|\s)", said), name
        lines = [json.loads(line) for line in said.splitlines()]
        warnings = [line["message"] for line in lines if line["level"] == "warning"]
        assert warnings[0].startswith("--trust-remote-code: ")
        assert warnings[1:] == ["VLLM_QWERTY is set, but has no effect"]
        assert lines[-1]["message"].startswith(f"inflight {__version__}")
        (line,) = [line for line in lines if line["logger"] == "inflight.loading.load"]
        assert (line["process"], line["level"]) == ("engine", "info")
        assert "1024 KV blocks" in line["message"]
        texts = [""] * 4
        with http.stream("POST", PATH, json={**GOOD, "n": 4}) as response:
            for number, line in enumerate(response.iter_lines()):
                if number == 0:
                    assert has_torch(worker_of(process))
                    assert not has_torch(process.pid)  # only the engine needs it
                    process.send_signal(signal.SIGTERM)
                    check_no_one_else_is_served(http)
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    texts[choice["index"]] += choice["text"]
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        assert texts == [llm.generate([5, 6], params)[0].outputs[0].text] * 4
        assert process.wait(120) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr.read().splitlines() if line]
    # The stream ends last; requests sent just before the signal took effect were answered too.
    *_, access = [line for line in lines if line["logger"] == "inflight.access" and line["status"] == 200]
    assert access["request_id"].startswith("cmpl-")
    assert (access["method"], access["path"]) == ("POST", PATH)
    assert any("shutting down" in line["message"] for line in lines)


def check_no_one_else_is_served(http: httpx.Client) -> None:
    """Check that a stopping server soon rejects new requests."""
    while (refused := http.post(PATH, json={"prompt": "x", "max_tokens": 1})).status_code == 200:
        pass
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert http.get("/health").status_code == http.get("/ready").status_code == 503


def has_torch(process_id: int) -> bool:
    return "libtorch" in Path(f"/proc/{process_id}/maps").read_text()


def worker_of(process: subprocess.Popen[str]) -> int:
    """Return the id of the engine process once it runs."""
    number: int
    (number,) = wait_until(lambda: children(process.pid, "inflight.engine.remote.worker"), "its engine")
    return number


def kill_while_it_streams(process: subprocess.Popen[str], http: httpx.Client) -> None:
    with http.stream("POST", PATH, json={**GOOD, "max_tokens": 2000}) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(worker_of(process), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "engine_unavailable")


def test_dead_engine_is_restarted_until_max_restarts_then_the_server_exits(llm: LLM) -> None:
    """The server exits, so that a service supervisor can restart it."""
    with serving("--max-restarts", "1") as (process, http, _):
        kill_while_it_streams(process, http)
        statuses: list[int] = []
        while not statuses or statuses[-1] != 200:
            statuses.append(http.get("/health").status_code)
        assert set(statuses) <= {200, 503}
        body = {**GOOD, "max_tokens": 40, "stream": False}
        answer = http.post(PATH, json=body).json()
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        assert answer["choices"][0]["text"] == llm.generate([5, 6], params)[0].outputs[0].text
        assert "inflight:engine_restarts_total{" in http.get("/metrics").text
        assert re.search(r"engine_restarts_total\{.*\} 1\.0", http.get("/metrics").text)
        kill_while_it_streams(process, http)
        assert process.wait(120) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.splitlines()[-1] == (
        "inflight: the engine is dead and the server stops: the engine process ended by SIGKILL"
    )
    assert "Traceback" not in said


def check_one_line(code: int | str | None, said: str, message: str) -> None:
    assert code == 1
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keys", "/nowhere"), "the keys file '/nowhere' cannot be read"),
        (("--max-queue", "0"), "max_queue is 0"),
        (("--api-key", "x", "--admin-key", "x"), "admin_key is also an API key"),
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("--allowed-hosts", "localhost:8000"), "allowed_hosts has 'localhost:8000'"),
    ],
)
def test_invalid_options_are_reported_in_one_line_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        run_module, "configure_logging", lambda *_: None
    )  # the logs of this process are pytest's
    monkeypatch.setattr(sys, "argv", ["inflight", "serve", "--port", "0", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    check_one_line(exit_.value.code, capsys.readouterr().err, message)
