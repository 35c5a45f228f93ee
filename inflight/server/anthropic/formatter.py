"""An answer as /v1/messages writes it, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from inflight.server.anthropic.blocks import MessageBlocks, event
from inflight.server.anthropic.errors import error_body, error_response
from inflight.server.errors import ApiError
from inflight.server.formatters import Choice, ResponseFormatter, encode, usage_of

# By the reason of the end; an answer that was cancelled has none.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormatter(ResponseFormatter):
    """Of one answer: this API knows no `n`."""

    def __init__(self, request_id: str, model: str, shows_thinking: bool) -> None:
        self._request_id = request_id
        self._model = model
        self._blocks = MessageBlocks(shows_thinking)

    def opening(self, choices: list[Choice]) -> bytes:
        """How much of the prompt is cached is not known yet: the last event says it."""
        (choice,) = choices
        usage = {"input_tokens": len(choice.prompt.prompt_token_ids), "output_tokens": 0}
        message = self._message(usage | {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0})
        return event("message_start", message=message) + event("ping")

    def more(self, choice: Choice) -> bytes:
        return self._blocks.write(choice.take())

    def end(self, choice: Choice) -> bytes:
        return self.more(choice) + self._blocks.finish(choice.finish_reason in ("stop", "tool_calls"))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        return event("message_delta", delta=_end(choice), usage=_usage(choice)) + event("message_stop")

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        (choice,) = choices
        self.end(choice)
        yield encode(self._message(_usage(choice)) | {"content": self._blocks.blocks} | _end(choice))

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error, self._request_id)

    def error_response(self, error: ApiError) -> Response:
        return error_response(error, self._request_id)

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
    if choice.finish_reason == "stop" and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _STOP_REASONS.get(choice.finish_reason or ""), "stop_sequence": None}


def _usage(choice: Choice) -> dict[str, Any]:
    """Here what was found in the cache is counted apart."""
    used = usage_of([choice])
    num_cached = used["prompt_tokens_details"]["cached_tokens"]
    reader = choice.reader
    return {
        "input_tokens": used["prompt_tokens"] - num_cached,
        "output_tokens": used["completion_tokens"],
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0 if reader is None else reader.num_reasoning_tokens},
    }
