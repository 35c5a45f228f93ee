"""Answers in the format of /v1/messages, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.responses import Response

from inflight.server.errors import ApiError
from inflight.server.formatters import Choice, PartKind, PartWriter, ResponseFormatter, encode, usage_of

_encode, _decode = msgspec.json.encode, msgspec.json.decode
# Clients need a signature to send a thinking block back. Nothing here checks it.
SIGNATURE = "unsigned"


def event(event_type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event_type.encode(), _encode({"type": event_type, **fields}))


class MessageBlocks(PartWriter):
    """Writes each part as a content block."""

    def __init__(self, shows_thinking: bool) -> None:
        """Without `shows_thinking`, thinking blocks have no text."""
        super().__init__()
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _begun(self, part_kind: PartKind, name: str, call_id: str) -> bytes:
        if part_kind == "reasoning":
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        elif part_kind == "text":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self.blocks.append(block)
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, part_kind: PartKind, text: str) -> bytes:
        if part_kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
            return self._block_delta(delta) if self._shows_thinking else b""
        if part_kind == "text":
            return self._block_delta({"type": "text_delta", "text": text})
        return self._block_delta({"type": "input_json_delta", "partial_json": text})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _ended(self, part_kind: PartKind, text: str, complete: bool) -> bytes:  # noqa: ARG002
        block, signed = self.blocks[-1], b""
        if part_kind == "reasoning":
            block |= {"thinking": text if self._shows_thinking else "", "signature": SIGNATURE}
            signed = self._block_delta({"type": "signature_delta", "signature": SIGNATURE})
        elif part_kind == "text":
            block["text"] = text
        else:
            block["input"] = _object(text)
        return signed + event("content_block_stop", index=self._index)


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, or {} if they are incomplete: the stop reason of the message says why."""
    try:
        value = _decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# By finish reason; a cancelled answer has none.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormatter(ResponseFormatter):
    """Writes one answer: this API has no `n`."""

    def __init__(self, request_id: str, model: str, shows_thinking: bool) -> None:
        self._request_id = request_id
        self._model = model
        self._blocks = MessageBlocks(shows_thinking)

    def opening(self, choices: list[Choice]) -> bytes:
        """Return the first events. The number of cached tokens is not known yet: the last event has it."""
        (choice,) = choices
        usage = {"input_tokens": len(choice.prompt.prompt_token_ids), "output_tokens": 0}
        message = self._message(usage | {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0})
        return event("message_start", message=message) + self.ping()

    def more(self, choice: Choice) -> bytes:
        return self._blocks.write(choice.answer.take_events())

    def end(self, choice: Choice) -> bytes:
        return self.more(choice) + self._blocks.finish(choice.answer.finish_reason in ("stop", "tool_calls"))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        return event("message_delta", delta=_end(choice), usage=_usage(choice)) + event("message_stop")

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        (choice,) = choices
        self.end(choice)
        yield encode(self._message(_usage(choice)) | {"content": self._blocks.blocks} | _end(choice))

    def ping(self) -> bytes:
        return event("ping")

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error.anthropic_body(self._request_id)

    def error_response(self, error: ApiError) -> Response:
        return error.anthropic_response(self._request_id)

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _end(choice: Choice) -> dict[str, Any]:
    stopped_by = choice.answer.output.stop_reason
    if choice.answer.finish_reason == "stop" and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _STOP_REASONS.get(choice.answer.finish_reason or ""), "stop_sequence": None}


def _usage(choice: Choice) -> dict[str, Any]:
    """Return the usage, in which cached tokens are counted separately."""
    used = usage_of([choice])
    num_cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - num_cached,
        "output_tokens": used["completion_tokens"],
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens_details": {"thinking_tokens": choice.answer.num_reasoning_tokens},
    }
