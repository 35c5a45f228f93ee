"""The requests of Claude Code 2.1: the same fields, headers and blocks, with texts of our own.

The program itself is too large to install for tests; tests/server/clients/test_claude_code.py runs an older one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.server.schemas import IMAGE_NOTE
from tests.frontend.text.templates import GEMMA, LLAMA3, QWEN3
from tests.server.calling import TEMPLATE, CallingBackend, call
from tests.server.live import Live, live_server
from tests.server.parsed import read_events
from tests.server.scripted import ScriptedBackend, write_folder

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-tool-changes-2026-07-01,advanced-tool-use-2025-11-20,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "dummy",
    "x-app": "cli",
    "x-stainless-timeout": "600",
}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
NAMES = ("Agent", "Bash", "Edit", "Read", "Skill", "ToolSearch", "Write")


def tool(name: str, **more: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to do."},
            "mode": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            "items": {"type": "array", "items": {"type": "object", "additionalProperties": False}},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    return {
        "name": name,
        "description": f"Use {name}.\n\n" + "It does a lot. " * 40,
        "input_schema": schema,
        **more,
    }


def body_of(*messages: Any, deferred: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a request with these messages after the first question."""
    reminder = {"type": "text", "text": "<system-reminder>\nSign your commits.\n</system-reminder>\n"}
    environment = {"type": "text", "text": "# Environment\nPlatform: linux", **EPHEMERAL}
    return {
        "model": "m",
        "messages": [
            {"role": "user", "content": [reminder, {"type": "text", "text": "Look at the picture."}]},
            {"role": "system", "content": [environment] if not messages else environment["text"]},
            *messages,
        ],
        "system": [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.326.397; cc_entrypoint=sdk-cli;",
            },
            {"type": "text", "text": "You are an agent.", **EPHEMERAL},
            {"type": "text", "text": "\nWork with the user toward their goals.", **EPHEMERAL},
        ],
        "tools": [
            *map(tool, NAMES),
            *(tool(name, defer_loading=True) for name in deferred),
            {
                "name": "DeferredToolPlaceholder",
                "description": "Reserved.",
                "input_schema": {"type": "object", "properties": {}},
                "defer_loading": True,
            },
        ],
        "metadata": {
            "user_id": json.dumps({"device_id": "5" * 64, "account_uuid": "", "session_id": "2f8b-12e7"})
        },
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def turn(call_id: str, name: str, content: Any) -> list[dict[str, Any]]:
    """Return a call and its result."""
    use = {"type": "tool_use", "id": call_id, "name": name, "input": {"query": "picture"}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": content, **EPHEMERAL}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


SEARCH = turn("call_1", "ToolSearch", [{"type": "tool_reference", "tool_name": "WebFetch"}])
IMAGE = {"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo=", "media_type": "image/png"}}


class Agent(CallingBackend):
    max_model_len = 65536


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    backend = Agent(tmp_path_factory.mktemp("tokenizer"))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(agent: Agent) -> Iterator[Live]:
    with live_server(agent, served_model_name=("m",), replace_images=True) as live:
        yield live


def send(server: Live, body: dict[str, Any]) -> list[Any]:
    response = server.http.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    return read_events(response.content)


@pytest.mark.parametrize("display", ["omitted", "updates", "summarized"])
def test_first_request_is_answered_with_a_call(server: Live, agent: Agent, display: str) -> None:
    agent.say("I will look." + call("Read", query="picture.png"))
    events = send(server, body_of() | {"thinking": {"type": "adaptive", "display": display}})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(block["type"], block.get("name")) for block in starts] == [("text", None), ("tool_use", "Read")]
    assert "billing" not in agent.prompt
    assert "DeferredToolPlaceholder" not in agent.prompt
    assert "Platform: linux" in agent.prompt


def test_safeguards_are_rejected_by_name(server: Live) -> None:
    """The server has no classifier of dangerous calls. The client sends the request again and checks calls itself."""
    body = body_of() | {"safeguards": [{"type": "dangerous_tool_use", "classifier_context": {"v": 1}}]}
    response = server.http.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "unknown parameter: safeguards"


def test_tool_that_a_search_refers_to_can_be_called(server: Live, agent: Agent) -> None:
    agent.say(call("WebFetch", query="rain"))
    events = send(server, body_of(*SEARCH, deferred=("WebFetch", "WebSearch")))
    assert any(event.get("content_block", {}).get("name") == "WebFetch" for event in events)
    assert "Use WebFetch." in agent.prompt
    assert "Use WebSearch." not in agent.prompt


def test_image_in_a_result_is_a_note(server: Live, agent: Agent) -> None:
    agent.say("It is red.")
    events = send(server, body_of(*turn("call_2", "Read", [IMAGE])))
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert IMAGE_NOTE in agent.prompt


class Model(ScriptedBackend):
    max_model_len = 65536


@pytest.mark.parametrize(
    "template", [LLAMA3, GEMMA, QWEN3, TEMPLATE], ids=["llama3", "gemma", "qwen3", "hermes"]
)
def test_system_message_after_the_question_works_with_every_template(tmp_path: Path, template: str) -> None:
    backend = Model(write_folder(tmp_path, template))
    try:
        with live_server(backend, served_model_name=("m",)) as live:
            body = {name: value for name, value in body_of().items() if name not in ("system", "tools")}
            assert send(live, body)[-1]["type"] == "message_stop"
    finally:
        backend.close()
