"""Errors of the hub say what is wrong: the name, the revision, the permission or the network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from inflight.checkpoint.checkpoint import locate_checkpoint
from inflight.errors import ModelError

ANSWERS = {  # of the hub, by the model's name: status and error code
    "missing": (401, "RepoNotFound"),
    "gated": (403, "GatedRepo"),
    "moved": (404, "RevisionNotFound"),
    "broken": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, code = ANSWERS[self.path.split("/")[4]]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "the hub has no such model, or it is private: check the name, or set HF_TOKEN"),
        ("gated", "it is gated: accept its conditions on the hub's page, and set HF_TOKEN"),
        ("moved", "the hub has no such revision"),
        ("broken", "the hub answered with an error: Server error '500"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_hub_error_says_what_is_wrong(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        locate_checkpoint(f"owner/{name}", "v2", str(tmp_path), weights=True)
    assert str(caught.value).startswith(
        f"'owner/{name}' at revision 'v2' is not a local folder and could not be downloaded: {message}"
    )
    assert "\n" not in str(caught.value)


def test_missing_network_is_not_a_missing_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as closed:
        port = closed.server_port
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    unreachable = "the hub cannot be reached: check the network, or pass a folder"
    for offline in (False, True):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(ModelError) as caught:
            locate_checkpoint("owner/name", None, str(tmp_path), weights=True)
        expected = "HF_HUB_OFFLINE is set, and the model is not in the cache" if offline else unreachable
        assert str(caught.value).endswith(f"could not be downloaded: {expected}")


def test_invalid_hub_id_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it is not a valid hub id: it must be owner/name"):
        locate_checkpoint("owner/na me?", None, str(tmp_path), weights=True)
