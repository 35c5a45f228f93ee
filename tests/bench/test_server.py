"""Requests made before measuring."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from inflight.bench import server
from inflight.bench.server import ServerAddress
from inflight.errors import EngineError

LOADING = (503, {"error": {"message": "the model is loading: please retry later", "code": "loading"}})
MODELS = (200, {"data": [{"id": "m"}]})


@contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[tuple[ServerAddress, list[str]]]:
    """Serve these answers in turn; yields the address and the list of requested paths."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = answers[len(paths)]
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        try:
            yield ServerAddress.parse(f"http://127.0.0.1:{http_server.server_port}", None), paths
        finally:
            http_server.shutdown()
            thread.join()


def test_waits_while_the_server_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.0)
    with answering(LOADING, LOADING, MODELS, MODELS) as (address, paths):
        address.wait_until_loaded()
        assert len(paths) == 3
        assert address.model() == "m"


@pytest.mark.parametrize("answer", [MODELS, (503, None), (503, {"error": "draining"}), (404, [])])
def test_does_not_wait_after_any_other_answer(answer: tuple[int, Any]) -> None:
    with answering(answer) as (address, paths):
        address.wait_until_loaded()
        assert paths == ["/v1/models"]


def test_rejected_requests_are_reported() -> None:
    no_model = {"error": {"message": "the model 'x' is not served here"}}
    with (
        answering((404, no_model)) as (address, _),
        pytest.raises(EngineError, match="404: the model 'x' is"),
    ):
        address.vocab_size("x", 128)
    no_ids = {"error": {"message": "text only"}}
    rejected = pytest.raises(EngineError, match=r"token ids as a prompt \(text only\): use --endpoint chat")
    with answering((400, no_ids), (400, no_ids)) as (address, _), rejected:
        address.vocab_size("m", 128)
