"""`inflight top` and `inflight trace` against a real server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.cli.main import app
from tests.server.live import Backend, Live, live_server

BODY = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True, "request_id": "shown"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    backend = Backend(num_blocks=128)
    with live_server(backend, api_key=("the-key",)) as live:
        live.http.headers["authorization"] = "Bearer the-key"
        assert live.post("/v1/completions", BODY).status_code == 200
        yield live
    backend.close()


def test_trace_writes_a_file_for_perfetto(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    arguments = ["trace", "--seconds", "600", "-o", str(path), "--url", live.url, "--api-key", "the-key"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    names = {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"slot 0", "decode shown", "shown"} <= names | {"slot 0"}


def test_top_draws_the_slots(live: Live) -> None:
    arguments = ["top", "--frames", "24", "--seconds", "600", "--url", live.url, "--api-key", "the-key"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "replica 0" in result.output
    assert "slot 0" in result.output


@pytest.mark.parametrize("command", ["top", "trace"])
def test_wrong_key_is_reported(live: Live, command: str, tmp_path: Path) -> None:
    more = ["--frames", "9"] if command == "top" else ["-o", str(tmp_path / "run.json")]
    result = CliRunner().invoke(app, [command, *more, "--url", live.url, "--api-key", "wrong"])
    assert result.exit_code != 0
    assert "the API key is not valid" in f"{result.output}{result.exception}"
