"""An answer as /v1/responses writes it, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from inflight.sampling_params import SamplingParams
from inflight.server.errors import ApiError
from inflight.server.formatters import Choice, ResponseFormatter, encode, usage_of
from inflight.server.openai.responses.items import EventNumbers, ResponseItems
from inflight.server.openai.responses.schemas import ResponsesBody

Keep = Callable[[dict[str, Any]], None]  # takes a response that has ended


class ResponsesFormatter(ResponseFormatter):
    """Of one answer: this API knows no `n`."""

    def __init__(self, head: dict[str, Any], keep: Keep | None) -> None:
        """`head` is what the response has from its beginning on."""
        self._head = head
        self._keep = keep
        self._numbers = EventNumbers()
        self._items = ResponseItems(self._numbers)

    def opening(self, choices: list[Choice]) -> bytes:  # noqa: ARG002
        begun = self.so_far()
        events = ("response.created", "response.in_progress")
        return b"".join([self._numbers.event(event, response=begun) for event in events])

    def more(self, choice: Choice) -> bytes:
        return self._items.write(choice.take())

    def end(self, choice: Choice) -> bytes:
        return self.more(choice) + self._items.finish(choice.finish_reason in ("stop", "tool_calls"))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        found = self._ended(choice)
        # There is no event for one that was cancelled: it is incomplete as well.
        kind = "completed" if found["status"] == "completed" else "incomplete"
        return self._numbers.event(f"response.{kind}", response=found)

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        (choice,) = choices
        self.end(choice)
        yield encode(self._ended(choice))

    def error_event(self, error: ApiError) -> bytes:
        """What went wrong, and then the response as far as it came."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {**self.so_far("failed"), "error": {"code": code, "message": error.message}}
        told = self._numbers.event("error", code=error.code, message=error.message, param=error.param)
        return told + self._numbers.event("response.failed", response=failed)

    def so_far(self, status: str = "in_progress") -> dict[str, Any]:
        """The response with what is there of it."""
        return {**self._head, "status": status, "output": self._items.so_far()}

    def _ended(self, choice: Choice) -> dict[str, Any]:
        found = {**self.so_far(_STATUSES.get(choice.finish_reason or "", "completed"))}
        if found["status"] == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        found |= {"completed_at": int(time.time()), "usage": _usage(choice)}
        if self._keep is not None:
            self._keep(found)
        return found


_STATUSES = {"length": "incomplete", "abort": "cancelled"}  # by the reason of the end


def _usage(choice: Choice) -> dict[str, Any]:
    used = usage_of([choice])
    reader = choice.reader
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0 if reader is None else reader.num_reasoning_tokens},
        "total_tokens": used["total_tokens"],
    }


def head_of(
    response_id: str, created: int, model: str, body: ResponsesBody, sampling: SamplingParams
) -> dict[str, Any]:
    """What a response says of what was asked for."""
    text, reasoning = body.text, body.reasoning
    wanted: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        wanted = text.format.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": wanted, "verbosity": (text and text.verbosity) or "medium"},
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "background": False,
        "store": body.store is not False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "top_logprobs": 0,
    }
