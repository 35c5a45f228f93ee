"""Required tool calls, streamed by each API and assembled from its events."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 40, "maxLength": 60},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 9},
            "minItems": 40,
            "maxItems": 45,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAME = "weather"
# A call begins, with its name and the brace of its arguments, in this many tokens.
TOKENS_BEFORE_ARGUMENTS = 20
CHAT_MAX_TOKENS = 500  # by which its requests are known
SAMPLED = {"temperature": 0.9, "seed": 3, "parallel_tool_calls": False, "stream": True}
QUESTION = {"role": "user", "content": "Will it rain?"}


@dataclass(frozen=True)
class StreamedCall:
    """The one call of an answer."""

    name: str
    arguments: str
    ended: str  # the reason of the answer's end

    def check(self) -> None:
        assert self.name == NAME
        jsonschema.validate(json.loads(self.arguments), SCHEMA)


@dataclass(frozen=True)
class CallingAnswers:
    """The answers to one request, each with a call."""

    calls: list[StreamedCall]
    num_prompt_tokens: int
    num_output_tokens: int


def by_chat(http: httpx.Client) -> CallingAnswers:
    body = {
        **SAMPLED,
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}],
        "tool_choice": "required",
        "n": 2,
        "max_tokens": CHAT_MAX_TOKENS,
        "request_id": "called-by-chat",
        "stream_options": {"include_usage": True},
    }
    begun: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = defaultdict(str)
    ended: dict[int, str] = {}
    for event in _events(http, "/v1/chat/completions", body):
        for choice in event["choices"]:
            index = choice["index"]
            for call in choice["delta"].get("tool_calls", ()):
                assert call["index"] == 0
                if "id" in call:
                    assert index not in begun, "a call began twice"
                    begun[index] = call
                arguments[index] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                ended[index] = choice["finish_reason"]
        usage = event["usage"]
    assert len({call["id"] for call in begun.values()}) == 2
    calls = [
        StreamedCall(begun[index]["function"]["name"], arguments[index], ended[index]) for index in (0, 1)
    ]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return CallingAnswers(calls, usage["prompt_tokens"], usage["completion_tokens"])


def by_messages(http: httpx.Client) -> CallingAnswers:
    body = {
        "stream": True,
        "temperature": 0.9,
        "seed": 3,
        "messages": [QUESTION],
        "tools": [{"name": NAME, "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 400,
    }
    events = list(_events(http, "/v1/messages", body))
    (begun,) = (event["content_block"] for event in events if event["type"] == "content_block_start")
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    (last,) = (event for event in events if event["type"] == "message_delta")
    used = last["usage"]
    call = StreamedCall(begun["name"], "".join(pieces), last["delta"]["stop_reason"])
    num_prompt_tokens = used["input_tokens"] + used["cache_read_input_tokens"]
    return CallingAnswers([call], num_prompt_tokens, used["output_tokens"])


def by_responses(http: httpx.Client) -> CallingAnswers:
    body = {
        **SAMPLED,
        "input": [QUESTION],
        "tools": [{"type": "function", "name": NAME, "parameters": SCHEMA, "strict": True}],
        "tool_choice": "required",
        "max_output_tokens": 400,
    }
    events = list(_events(http, "/v1/responses", body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    pieces = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    arguments = "".join(piece["delta"] for piece in pieces)
    items = [event["item"] for event in events if "item" in event]
    (item,) = events[-1]["response"]["output"]
    assert {(one["id"], one["call_id"]) for one in items} == {(item["id"], item["call_id"])}
    assert {piece["item_id"] for piece in pieces} == {item["id"]}
    assert item["arguments"] == arguments
    used = events[-1]["response"]["usage"]
    call = StreamedCall(item["name"], arguments, events[-1]["response"]["status"])
    return CallingAnswers([call], used["input_tokens"], used["output_tokens"])


ENDINGS = {by_chat: "tool_calls", by_messages: "tool_use", by_responses: "completed"}


def _events(http: httpx.Client, path: str, body: Any) -> Iterator[dict[str, Any]]:
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event or event["error"] is None, event
                yield event
