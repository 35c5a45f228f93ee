"""Codex, whose package is too large for the tests: the requests that its version 0.169 sends, in its order of fields.

`docs/clients.md` says how the program itself was run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.calling import TEMPLATE, call
from tests.server.live import Live, live_server
from tests.server.scripted import ScriptedBackend, write_folder

PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
PATCH = '*** Begin Patch\n*** Add File: b.txt\n+say "b"\n*** End Patch\n'


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    fields = {"name": name, "description": f"Does {name}.", "strict": False}
    return {"type": "function", **fields, "parameters": {**parameters, "additionalProperties": False}}


TOOLS: list[dict[str, Any]] = [
    function("exec_command", cmd={"type": "string"}),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. This is a free-form tool.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for sub-agents.",
        "tools": [function("spawn_agent", message={"type": "string"})],
    },
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Searches tools.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
]


def message(role: str, text: str, item_id: str) -> dict[str, Any]:
    return {"type": "message", "id": item_id, "role": role, "content": [{"type": "input_text", "text": text}]}


def request(*history: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "input": [
            message("developer", "You are a coding agent.", "msg_1"),
            message("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>", "msg_2"),
            message("user", "What is in a.txt?", "msg_3"),
            *history,
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1eccd",
        "text": {"verbosity": "low"},
        "client_metadata": {"turn_id": "1", "x-codex-turn-metadata": json.dumps({"request_kind": "turn"})},
    }


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedBackend]:
    backend = ScriptedBackend(write_folder(tmp_path_factory.mktemp("model"), TEMPLATE))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(backend: ScriptedBackend) -> Iterator[Live]:
    with live_server(backend, served_model_name=("m",)) as live:
        yield live


def items_of(
    server: Live, backend: ScriptedBackend, script: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the items that Codex reads: it takes each from the event that ends it."""
    backend.client.script = script
    headers = {"accept": "text/event-stream", "originator": "codex_exec"}
    with server.http.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    assert events[-1]["response"]["usage"]["total_tokens"] > 0
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def resent(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as Codex sends it back: without its status, and without what it does not know."""
    return {name: value for name, value in item.items() if name not in ("status", "content")}


def test_codex_calls_a_function_a_custom_tool_and_a_namespace(server: Live, backend: ScriptedBackend) -> None:
    thinks = "<think>\nLet me look.\n</think>\n\n"
    reasoning, command = items_of(server, backend, thinks + call("exec_command", cmd="cat a.txt"), request())
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Let me look."}]
    assert json.loads(command["arguments"]) == {"cmd": "cat a.txt"}

    output = {"type": "function_call_output", "call_id": command["call_id"], "output": "one line"}
    history = [resent(reasoning), resent(command), output]
    (patch,) = items_of(server, backend, call("apply_patch", input=PATCH), request(*history))
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    constraint = backend.client.requests[-1].params.structured_outputs
    assert constraint is not None
    assert "Begin Patch" in constraint.text

    done = {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Success"}
    history += [resent(patch), done]
    script = call("multi_agent_v1__spawn_agent", message="Go.")
    (spawn,) = items_of(server, backend, script, request(*history))
    assert (spawn["name"], spawn["namespace"]) == ("spawn_agent", "multi_agent_v1")

    spawned = {"type": "function_call_output", "call_id": spawn["call_id"], "output": "{}"}
    (answer,) = items_of(server, backend, "It has one line.", request(*history, resent(spawn), spawned))
    assert answer["content"][0]["text"] == "It has one line."
