"""What is asked of a server before it is measured."""

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

LOADING = (503, {"error": {"message": "the model is being loaded", "code": "loading"}})
MODELS = (200, {"data": [{"id": "m"}]})


@contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[tuple[ServerAddress, list[str]]]:
    """A server that gives these answers in turn, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = answers[len(asked)]
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield ServerAddress.parse(f"http://127.0.0.1:{found.server_port}", None), asked
        finally:
            found.shutdown()
            thread.join()


def test_a_server_that_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.0)
    with answering(LOADING, LOADING, MODELS, MODELS) as (address, asked):
        address.wait_until_loaded()
        assert len(asked) == 3
        assert address.model() == "m"


@pytest.mark.parametrize("answer", [MODELS, (503, None), (503, {"error": "draining"}), (404, [])])
def test_no_other_answer_is_waited_for(answer: tuple[int, Any]) -> None:
    with answering(answer) as (address, asked):
        address.wait_until_loaded()
        assert asked == ["/v1/models"]


def test_what_a_server_refuses_is_told() -> None:
    no_model = {"error": {"message": "the model 'x' is not served here"}}
    with (
        answering((404, no_model)) as (address, _),
        pytest.raises(EngineError, match="404: the model 'x' is"),
    ):
        address.vocab_size("x", 128)
    no_ids = {"error": {"message": "text only"}}
    refused = pytest.raises(EngineError, match=r"token ids as a prompt \(text only\): use --endpoint chat")
    with answering((400, no_ids), (400, no_ids)) as (address, _), refused:
        address.vocab_size("m", 128)
