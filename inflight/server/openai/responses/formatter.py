"""Answers in the format of /v1/responses, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from inflight.events import PositionLogprobs
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.sampling_params import SamplingParams
from inflight.server.errors import ApiError
from inflight.server.formatters import (
    Choice,
    PartKind,
    PartWriter,
    ResponseFormatter,
    encode,
    json_pieces,
    usage_of,
)
from inflight.server.openai.formatters import chat_logprobs
from inflight.server.openai.responses.schemas import ResponsesBody
from inflight.server.openai.responses.tools import CallableTool, InputDecoder


class EventNumbers:
    """Writes the events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, event_type: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        body = encode({"type": event_type, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (event_type.encode(), body)


class TextLogprobs:
    """The logprobs of the tokens of an answer's text, without those of reasoning, markers and calls."""

    def __init__(self, choice: Choice, count: int, tokenizer: Tokenizer | None) -> None:
        self._choice, self._count, self._tokenizer = choice, count, tokenizer
        self._next = 0  # the first token that was not looked at yet
        self._num_ahead = 0  # characters that earlier tokens have beyond the text so far
        self._is_aligned = False  # the next token continues the text

    def begin(self) -> None:
        """Start another text: there may be white space, markers and calls before it."""
        self._is_aligned, self._num_ahead = False, 0

    def take(self, text: str) -> list[PositionLogprobs]:
        """Return the positions of the tokens of a text, which continues the previous one."""
        answer = self._choice.answer
        output, positions = answer.output, answer.positions
        self._next = max(self._next, answer.num_reasoning_tokens)
        taken: list[PositionLogprobs] = []
        while self._num_ahead < len(text) and self._next < len(positions):
            token_id = output.token_ids[self._next]
            token = "" if self._tokenizer is None else self._tokenizer.text_of(token_id)
            self._next += 1
            self._is_aligned = self._is_aligned or _can_start(token, text)
            if not self._is_aligned:
                continue
            taken.append(positions[self._next - 1])
            self._num_ahead += len(token)
        self._num_ahead = max(0, self._num_ahead - len(text))
        return taken

    def write(self, positions: Sequence[PositionLogprobs]) -> msgspec.Raw:
        content = chat_logprobs(positions, self._count, self._tokenizer)["content"]
        return msgspec.Raw(b"".join(json_pieces(content)))


def _can_start(token: str, text: str) -> bool:
    """Return whether a token may be the first of a text. The text of one that is part of a character is not known."""
    return bool(token) and (text.startswith(token) or token.startswith(text) or "\ufffd" in token)


class ResponseItems(PartWriter):
    """Writes each part as an item, with the same id in every event and in the final response."""

    logprobs: TextLogprobs | None = None  # if they were requested

    def __init__(
        self,
        numbers: EventNumbers,
        tools: Mapping[str, CallableTool] | None = None,
        with_summary: bool = False,
    ) -> None:
        """`tools` has what stands behind a function's name. `with_summary` makes the reasoning a summary."""
        super().__init__()
        self.items: list[dict[str, Any]] = []
        self._event = numbers.event
        self._tools = tools or {}
        self._with_summary = with_summary
        self._position: dict[str, Any] = {}  # the fields that locate the open item in its events
        self._input: InputDecoder | None = None  # of an open call of a custom tool
        self._positions: list[PositionLogprobs] = []  # of an open text

    def finish(self, complete: bool) -> bytes:
        """Return the events that end the last item. An empty answer gets an empty message, which clients look for."""
        start = b"" if self.items else self._switch("text")
        return start + super().finish(complete)

    def _begun(self, part_kind: PartKind, name: str, call_id: str) -> bytes:
        item = self._new_item(part_kind, name, call_id)
        self._position = {"item_id": item["id"], "output_index": len(self.items)}
        self._positions = []
        self.items.append(item)
        added = self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if part_kind == "call":
            return added
        if self.logprobs is not None:
            self.logprobs.begin()
        index, event = self._part_names(part_kind)
        self._position[index] = 0
        return added + self._event(
            f"response.{event}.added", **self._position, part=self._part(part_kind, "")
        )

    def _part_names(self, part_kind: PartKind) -> tuple[str, str]:
        """Return the name of a part's index, and that of its events."""
        if part_kind == "reasoning" and self._with_summary:
            return "summary_index", "reasoning_summary_part"
        return "content_index", "content_part"

    def _new_item(self, part_kind: PartKind, name: str, call_id: str) -> dict[str, Any]:
        number, status = secrets.token_hex(16), "in_progress"
        self._input = None
        if part_kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{number}", "status": status, "summary": [], "content": []}
        if part_kind == "text":
            item = {"type": "message", "id": f"msg_{number}", "status": status}
            return {**item, "role": "assistant", "content": []}
        tool = self._tools.get(name, CallableTool(name))
        call = {"call_id": call_id, "name": tool.name}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool.is_custom:
            self._input = InputDecoder()
            return {"type": "custom_tool_call", "id": f"ctc_{number}", "status": status, **call, "input": ""}
        return {"type": "function_call", "id": f"fc_{number}", "status": status, **call, "arguments": ""}

    def _delta(self, part_kind: PartKind, text: str) -> bytes:
        if part_kind == "text":
            logprobs: Any = []
            if self.logprobs is not None:
                positions = self.logprobs.take(text)
                self._positions += positions
                logprobs = self.logprobs.write(positions)
            return self._event("response.output_text.delta", **self._position, delta=text, logprobs=logprobs)
        if part_kind == "reasoning":
            name = "reasoning_summary_text" if self._with_summary else "reasoning_text"
        elif self._input is not None:
            name, text = "custom_tool_call_input", self._input.feed(text)
        else:
            name = "function_call_arguments"
        return self._event(f"response.{name}.delta", **self._position, delta=text) if text else b""

    def _ended(self, part_kind: PartKind, text: str, complete: bool) -> bytes:
        item = self.items[-1]
        item["status"] = "completed" if complete else "incomplete"
        item |= self._content(part_kind, text)
        if part_kind == "call":
            done = self._call_done(item)
        else:
            part, (_, event) = self._part(part_kind, text), self._part_names(part_kind)
            name, more = "output_text", {"logprobs": part["logprobs"]} if part_kind == "text" else {}
            if part_kind == "reasoning":
                name = "reasoning_summary_text" if self._with_summary else "reasoning_text"
            done = self._event(f"response.{name}.done", **self._position, text=text, **more)
            done += self._event(f"response.{event}.done", **self._position, part=part)
        return done + self._event(
            "response.output_item.done", output_index=self._position["output_index"], item=item
        )

    def _call_done(self, item: dict[str, Any]) -> bytes:
        if self._input is not None:
            return self._event("response.custom_tool_call_input.done", **self._position, input=item["input"])
        fields = {"name": item["name"], "arguments": item["arguments"]}
        return self._event("response.function_call_arguments.done", **self._position, **fields)

    def so_far(self) -> list[dict[str, Any]]:
        """Return the items, the open one with its content so far."""
        if self._open is None:
            return self.items
        *items, open_item = self.items
        return [*items, {**open_item, **self._content(self._open, "".join(self._pieces))}]

    def _content(self, part_kind: PartKind, text: str) -> dict[str, Any]:
        """Return the fields of the open item that grow."""
        if part_kind != "call":
            name = "summary" if part_kind == "reasoning" and self._with_summary else "content"
            return {name: [self._part(part_kind, text)]}
        return {"arguments": text} if self._input is None else {"input": self._input.text}

    def _part(self, part_kind: PartKind, text: str) -> dict[str, Any]:
        if part_kind == "reasoning":
            return {"type": "summary_text" if self._with_summary else "reasoning_text", "text": text}
        logprobs = [] if self.logprobs is None else self.logprobs.write(self._positions)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponsesFormatter(ResponseFormatter):
    """Writes one answer: this API has no `n`."""

    def __init__(
        self,
        head: dict[str, Any],
        on_end: Callable[[dict[str, Any]], None] | None = None,
        *,
        tools: Mapping[str, CallableTool] | None = None,
        with_summary: bool = False,
        num_logprobs: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`head` has the fields that are known from the start. `on_end` is called with the finished response."""
        self._head = head
        self._on_end = on_end
        self._num_logprobs, self._tokenizer = num_logprobs, tokenizer
        self._numbers = EventNumbers()
        self._items = ResponseItems(self._numbers, tools, with_summary)

    def _begin(self, choices: list[Choice]) -> Choice:
        (choice,) = choices
        if self._num_logprobs is not None:
            self._items.logprobs = TextLogprobs(choice, self._num_logprobs, self._tokenizer)
        return choice

    def opening(self, choices: list[Choice]) -> bytes:
        self._begin(choices)
        response, events = self.so_far(), ("response.created", "response.in_progress")
        return b"".join([self._numbers.event(event, response=response) for event in events])

    def more(self, choice: Choice) -> bytes:
        return self._items.write(choice.answer.take_events())

    def end(self, choice: Choice) -> bytes:
        return self.more(choice) + self._items.finish(choice.answer.finish_reason in ("stop", "tool_calls"))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        response = self._end(choice)
        # There is no event for cancelled responses: they count as incomplete.
        outcome = "completed" if response["status"] == "completed" else "incomplete"
        return self._numbers.event(f"response.{outcome}", response=response)

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        choice = self._begin(choices)
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
        response = self.so_far(_STATUSES.get(choice.answer.finish_reason or "", "completed"))
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= {"completed_at": int(time.time()), "usage": _usage(choice)}
        if self._on_end is not None:
            self._on_end(response)
        return response


_STATUSES = {"length": "incomplete", "abort": "cancelled"}  # by finish reason


def _usage(choice: Choice) -> dict[str, Any]:
    used = usage_of([choice])
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": choice.answer.num_reasoning_tokens},
        "total_tokens": used["total_tokens"],
    }


def head_of(
    response_id: str, created: int, model: str, body: ResponsesBody, sampling: SamplingParams
) -> dict[str, Any]:
    """Return the fields of a response that are known from its request."""
    text, reasoning = body.text, body.reasoning
    text_format: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        text_format = text.format.model_dump(by_alias=True)
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
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "truncation": "disabled",
        "background": False,
        "store": body.store is not False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "top_logprobs": body.top_logprobs or 0,
    }
