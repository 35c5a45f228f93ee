"""Images in messages and tool results: rejected by default, replaced by a note with --replace-images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight.server.schemas import IMAGE_NOTE
from tests.server.calling import CallingBackend
from tests.server.live import Live, live_server

DATA = "iVBORw0KGgo="
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}", "detail": "low"}}
INPUT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


BODIES: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": [user({"type": "text", "text": "What is this?"}, CHAT_IMAGE)]},
        "messages[0].content[1]",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                user({"type": "text", "text": "Look."}),
                {"role": "assistant", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [CHAT_IMAGE]},
            ]
        },
        "messages[2].content[0]",
    ),
    ("/v1/responses", {"input": [user(INPUT_IMAGE)]}, "input[0].content[0]"),
    (
        "/v1/responses",
        {"input": [FUNCTION_CALL, {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}]},
        "input[1].output[0]",
    ),
    ("/v1/messages", {"messages": [user(IMAGE_BLOCK)], "max_tokens": 8}, "messages[0].content[0]"),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "assistant", "content": [TOOL_USE]},
                user({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE_BLOCK]}),
            ],
            "max_tokens": 8,
        },
        "messages[1].content[0].content[0]",
    ),
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallingBackend]:
    backend = CallingBackend(tmp_path_factory.mktemp("tokenizer"))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def strict(scripted: CallingBackend) -> Iterator[Live]:
    with live_server(scripted) as live:
        yield live


@pytest.fixture(scope="module")
def lenient(scripted: CallingBackend) -> Iterator[Live]:
    with live_server(scripted, replace_images=True) as live:
        yield live


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
def test_image_is_rejected_with_the_option_that_accepts_it(
    strict: Live, path: str, body: dict[str, Any], param: str
) -> None:
    response = strict.post(path, body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"{param} is {{")
    assert "images are not supported (with --replace-images, the server replaces them by a note)" in message


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_image_is_replaced_by_a_note(
    lenient: Live, scripted: CallingBackend, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = lenient.post(path, {**body, "stream": stream})
    assert response.status_code == 200, (param, response.text)
    assert IMAGE_NOTE in scripted.prompt
    assert DATA not in scripted.prompt
    assert DATA not in response.text


def test_stored_conversation_keeps_the_note_only(lenient: Live) -> None:
    answer = lenient.post("/v1/responses", {"input": [user(INPUT_IMAGE)]}).json()
    items = lenient.http.get(f"/v1/responses/{answer['id']}/input_items").json()["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": IMAGE_NOTE}]
