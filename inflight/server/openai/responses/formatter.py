"""Answers in the format of /v1/responses, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from inflight.sampling_params import SamplingParams
from inflight.server.errors import ApiError
from inflight.server.formatters import Choice, PartKind, PartWriter, ResponseFormatter, encode, usage_of
from inflight.server.openai.responses.schemas import ResponsesBody

_PREFIXES: dict[PartKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}


class EventNumbers:
    """Writes the events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        body = encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


class ResponseItems(PartWriter):
    """Writes each part as an item, with the same id in every event and in the final response."""

    def __init__(self, numbers: EventNumbers) -> None:
        super().__init__()
        self.items: list[dict[str, Any]] = []
        self._event = numbers.event
        self._position: dict[str, Any] = {}  # the fields that locate the open item in its events

    def finish(self, complete: bool) -> bytes:
        """Return the events that end the last item. An empty answer gets an empty message, which clients look for."""
        start = b"" if self.items else self._switch("text")
        return start + super().finish(complete)

    def _begun(self, kind: PartKind, name: str, call_id: str) -> bytes:
        item_id = f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"
        item = _item(kind, item_id, name, call_id)
        self._position = {"item_id": item_id, "output_index": len(self.items)}
        self.items.append(item)
        added = self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if kind == "call":
            return added
        self._position["content_index"] = 0
        return added + self._event("response.content_part.added", **self._position, part=_part(kind, ""))

    def _delta(self, kind: PartKind, text: str) -> bytes:
        if kind == "text":
            return self._event("response.output_text.delta", **self._position, delta=text, logprobs=[])
        name = "reasoning_text" if kind == "reasoning" else "function_call_arguments"
        return self._event(f"response.{name}.delta", **self._position, delta=text)

    def _ended(self, kind: PartKind, text: str, complete: bool) -> bytes:
        item = self.items[-1]
        item["status"] = "completed" if complete else "incomplete"
        if kind == "call":
            item["arguments"] = text
            done = self._event(
                "response.function_call_arguments.done", **self._position, name=item["name"], arguments=text
            )
        else:
            item["content"] = [part] = [_part(kind, text)]
            if kind == "text":
                done = self._event("response.output_text.done", **self._position, text=text, logprobs=[])
            else:
                done = self._event("response.reasoning_text.done", **self._position, text=text)
            done += self._event("response.content_part.done", **self._position, part=part)
        return done + self._event(
            "response.output_item.done", output_index=self._position["output_index"], item=item
        )

    def so_far(self) -> list[dict[str, Any]]:
        """Return the items, the open one with its content so far."""
        if self._open is None:
            return self.items
        *items, last = self.items
        text = "".join(self._pieces)
        if self._open == "call":
            return [*items, {**last, "arguments": text}]
        return [*items, {**last, "content": [_part(self._open, text)]}]


def _item(kind: PartKind, item_id: str, name: str, call_id: str) -> dict[str, Any]:
    head = {"id": item_id, "status": "in_progress"}
    if kind == "reasoning":
        return {"type": "reasoning", **head, "summary": [], "content": []}
    if kind == "call":
        return {"type": "function_call", **head, "call_id": call_id, "name": name, "arguments": ""}
    return {"type": "message", **head, "role": "assistant", "content": []}


def _part(kind: PartKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponsesFormatter(ResponseFormatter):
    """Writes one answer: this API has no `n`."""

    def __init__(self, head: dict[str, Any], on_end: Callable[[dict[str, Any]], None] | None) -> None:
        """`head` has the fields that are known from the start. `on_end` is called with the finished response."""
        self._head = head
        self._on_end = on_end
        self._numbers = EventNumbers()
        self._items = ResponseItems(self._numbers)

    def opening(self, choices: list[Choice]) -> bytes:  # noqa: ARG002
        response, events = self.so_far(), ("response.created", "response.in_progress")
        return b"".join([self._numbers.event(event, response=response) for event in events])

    def more(self, choice: Choice) -> bytes:
        return self._items.write(choice.take())

    def end(self, choice: Choice) -> bytes:
        return self.more(choice) + self._items.finish(choice.finish_reason in ("stop", "tool_calls"))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        response = self._end(choice)
        # There is no event for cancelled responses: they count as incomplete.
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._numbers.event(f"response.{kind}", response=response)

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        (choice,) = choices
        self.end(choice)
        yield encode(self._end(choice))

    def error_event(self, error: ApiError) -> bytes:
        """Return an event with the error, and one with the response so far."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {**self.so_far("failed"), "error": {"code": code, "message": error.message}}
        event = self._numbers.event("error", code=error.code, message=error.message, param=error.param)
        return event + self._numbers.event("response.failed", response=failed)

    def so_far(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response with its output so far."""
        return {**self._head, "status": status, "output": self._items.so_far()}

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Return the finished response."""
        response = self.so_far(_STATUSES.get(choice.finish_reason or "", "completed"))
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= {"completed_at": int(time.time()), "usage": _usage(choice)}
        if self._on_end is not None:
            self._on_end(response)
        return response


_STATUSES = {"length": "incomplete", "abort": "cancelled"}  # by finish reason


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
    """Return the fields of a response that are known from its request."""
    text, reasoning = body.text, body.reasoning
    text_format: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        text_format = text.format.model_dump(by_alias=True, exclude_none=True)
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
        "text": {"format": text_format, "verbosity": (text and text.verbosity) or "medium"},
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
