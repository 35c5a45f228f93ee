"""Stored conversations: only fields that templates render, and no more than a request's body could hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.server.errors import ApiError
from inflight.server.http.bodies import MAX_PARTS, parse_body
from inflight.server.openai.responses.conversation import input_items
from inflight.server.openai.responses.schemas import ResponsesBody
from inflight.server.openai.responses.store import StoredItem, check_conversation

UNSEEN = "not rendered " * 1000


def stored(*items: Any) -> list[StoredItem]:
    body = parse_body(ResponsesBody, json.dumps({"input": items}).encode())
    return [StoredItem.of_input(item) for item in input_items(body)]


@pytest.mark.parametrize(
    "item",
    [
        {
            "role": "assistant",
            "phase": "commentary",
            "content": [
                {
                    "type": "output_text",
                    "text": "A fox.",
                    "annotations": [{"type": "url_citation", "title": UNSEEN}],
                    "logprobs": [{"token": UNSEEN, "logprob": 0.0}],
                }
            ],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Who?", "prompt_cache_breakpoint": {"mode": UNSEEN}}],
        },
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "Hm"}],
            "summary": [{"type": "summary_text", "text": UNSEEN}],
            "encrypted_content": UNSEEN,
        },
        {"type": "function_call_output", "call_id": "c", "output": "3", "name": UNSEEN},
    ],
    ids=["output_text", "input_text", "reasoning", "function_call_output"],
)
def test_fields_that_no_template_renders_are_not_stored(item: Any) -> None:
    (only,) = stored(item)
    assert len(only.data) < 200
    assert UNSEEN[:12].encode() not in only.data


def test_rendered_fields_are_stored_in_the_form_that_clients_list() -> None:
    message, refusal, call, output, summary = stored(
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "id": "msg_1", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
    )
    assert json.loads(message.data) == {
        "type": "message",
        "id": message.item_id,
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Who?"}],
    }
    assert refusal.item_id == "msg_1"
    assert json.loads(refusal.data)["content"] == [{"type": "refusal", "refusal": "No."}]
    assert json.loads(call.data).items() >= {"name": "add", "arguments": "{}", "status": "incomplete"}.items()
    assert json.loads(output.data)["output"] == [{"type": "input_text", "text": "3"}]
    assert json.loads(summary.data)["summary"] == [{"type": "summary_text", "text": "Hm"}]


def test_conversation_has_the_limits_of_a_body() -> None:
    items = stored({"role": "user", "content": "x" * 1000})
    num_bytes = len(items[0].data)
    check_conversation(items * 3, 3 * num_bytes, "input")
    with pytest.raises(ApiError, match=rf"has {4 * num_bytes} bytes: at most {3 * num_bytes}") as refused:
        check_conversation(items * 4, 3 * num_bytes, "previous_response_id")
    assert (refused.value.status, refused.value.code) == (400, "conversation_too_large")
    assert refused.value.param == "previous_response_id"
    many = stored({"role": "user", "content": [{"type": "input_text", "text": ""}] * 10_000})
    with pytest.raises(ApiError, match=f"keys, objects and lists: at most {MAX_PARTS}"):
        check_conversation(many * 3, 1 << 30, "input")
