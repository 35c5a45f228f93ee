"""Grammars that take long to try delay their own key alone, and only while its clients wait for them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inflight.constraints import validator as validator_module
from inflight.constraints.validator import GrammarValidator
from inflight.server.state import TEXT_THREADS
from tests.constraints.test_validator import INTERSECTIONS
from tests.server.live import Backend, Live, live_server

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello!"}
NUM_HOSTILE = 4 * TEXT_THREADS


@pytest.fixture
def keyed(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server with two keys, on which hostile grammars are tried for ever unless something ends that."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: alice, key: alice-secret}, {name: mallory, key: mallory-secret}]")
    for name in ("ATTEMPT_SECONDS", "TRIAL_SECONDS", "WALL_SECONDS"):
        monkeypatch.setattr(validator_module, name, 3600.0)
    with live_server(backend, keys=str(path)) as live:
        yield live
        live.wait_until("no trial", lambda: not validator(live)._running)
        live.wait_until_idle()


def validator(live: Live) -> GrammarValidator:
    return live.state.model.frontend.input_processor.grammars


def num_trying(live: Live) -> int:
    """Trials that a process is busy with."""
    return sum(shared._process is not None for shared in list(validator(live)._running.values()))


def tools(name: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


def send(live: Live, body: dict[str, Any], key: str) -> socket.socket:
    """Send a chat without waiting for its answer."""
    host, _, port = live.url.removeprefix("http://").partition(":")
    content = json.dumps({"messages": [USER], **body}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + content)
    return connection


def send_hostile(live: Live, stack: ExitStack) -> list[socket.socket]:
    """Send many chats of one key, each with a new schema, and wait until all of them have arrived."""
    connections = [
        stack.enter_context(
            send(live, {"tools": tools(f"f{i}", INTERSECTIONS), "tool_choice": "required"}, "mallory-secret")
        )
        for i in range(NUM_HOSTILE)
    ]
    live.wait_until("all trials", lambda: len(validator(live)._running) == NUM_HOSTILE)
    live.wait_until("a busy process", lambda: num_trying(live) == 1)
    return connections


def test_hostile_grammars_do_not_block_chats_of_other_keys(keyed: Live) -> None:
    headers = {"authorization": "Bearer alice-secret"}
    with ExitStack() as stack:
        send_hostile(keyed, stack)
        for number in range(3):
            for body in (
                {},
                {"tools": tools(f"add{number}", {"type": "integer"}), "tool_choice": "required"},
                {"response_format": {"type": "json_object"}},
            ):
                response = keyed.post(PATH, {"messages": [USER], "max_tokens": 2, **body}, headers=headers)
                assert response.status_code == 200, response.text
        assert len(validator(keyed)._running) == NUM_HOSTILE
        assert num_trying(keyed) == 1  # the other process is not for the same key


def test_disconnected_clients_end_their_grammar_trials(keyed: Live) -> None:
    with ExitStack() as stack:
        connections = send_hostile(keyed, stack)
        for connection in connections:
            connection.close()
        keyed.wait_until("no trial", lambda: not validator(keyed)._running)
    body = {"messages": [USER], "max_tokens": 2, "tools": tools("add", {"type": "integer"})}
    response = keyed.post(
        PATH, {**body, "tool_choice": "required"}, headers={"authorization": "Bearer mallory-secret"}
    )
    assert response.status_code == 200, response.text
