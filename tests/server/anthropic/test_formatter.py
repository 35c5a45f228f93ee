"""The blocks of a message and their events, as the anthropic package's own types have them."""

from __future__ import annotations

import json
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from pydantic import TypeAdapter

from inflight.server.anthropic.formatter import SIGNATURE, MessageBlocks
from inflight.server.errors import ApiError
from tests.server.parsed import CUT_SHORT, WHOLE, read_events


@cache
def types() -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Return the types of events and of blocks of the package, which takes seconds to import."""
    from anthropic.types import ContentBlock, RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent), TypeAdapter(ContentBlock)


def written(
    events: list[Any], shows_thinking: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    event_type, block_type = types()
    blocks = MessageBlocks(shows_thinking)
    sent = read_events(blocks.write(events) + blocks.finish(True))
    for event in sent:
        event_type.validate_python(event)
    for block in blocks.blocks:
        block_type.validate_python(block)
    return sent, blocks.blocks


def test_each_block_is_started_filled_and_stopped_before_the_next() -> None:
    sent, _ = written(WHOLE)
    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in sent]
    one_by_one = [(kind, index) for index in range(4) for kind in ("start", "delta", "stop")]
    assert [kind for kind, _ in groupby(kinds)] == one_by_one


def test_deltas_add_up_to_the_blocks() -> None:
    sent, blocks = written(WHOLE)
    assert blocks == [
        {"type": "thinking", "thinking": "I should add.", "signature": SIGNATURE},
        {"type": "text", "text": "Let me add."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": blocks[3]["id"], "name": "now", "input": {}},
    ]
    assert blocks[3]["id"].startswith("call_")
    texts = ["", "", "", ""]
    for event in sent:
        if event["type"] == "content_block_delta":
            _, *text = event["delta"].values()
            texts[event["index"]] += "".join(text)
        elif event["type"] == "content_block_start":
            assert event["content_block"].get("id") == blocks[event["index"]].get("id")
    assert texts == [f"I should add.{SIGNATURE}", "Let me add.", '{"a": 1}', "{}"]


def test_omitted_thinking_keeps_its_signature() -> None:
    sent, blocks = written(WHOLE[:2], shows_thinking=False)
    assert blocks == [{"type": "thinking", "thinking": "", "signature": SIGNATURE}]
    assert [event["delta"]["type"] for event in sent if "delta" in event] == ["signature_delta"]


def test_incomplete_arguments_become_an_empty_input() -> None:
    _, (block,) = written(CUT_SHORT)
    assert block["input"] == {}


@pytest.mark.parametrize(
    ("status", "sent_status", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (413, 413, "request_too_large"),
        (415, 415, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_errors_have_anthropic_status_and_type(status: int, sent_status: int, kind: str) -> None:
    error = ApiError(status, "no", retry_after=3)
    response = error.anthropic_response("req-1")
    assert response.status_code == sent_status
    assert response.headers["retry-after"] == "3"
    assert response.body == error.anthropic_body("req-1")
    body = json.loads(bytes(response.body))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req-1"}
    if kind != "request_too_large":  # documented, but missing in the package
        from anthropic.types.shared import ErrorResponse

        ErrorResponse.model_validate(body)
