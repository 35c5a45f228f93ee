"""The base of what writes answers in the format of an API, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from inflight.frontend.agents.source import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.frontend.output_processor import Answer, OutputProcessor
from inflight.server.errors import ApiError

encode = msgspec.json.encode


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces.

    Objects are cut between their items. An iterator is an array that is encoded item by item, where a `msgspec.Raw` may
    hold several items with commas between them. Other values are one piece.
    """
    if isinstance(value, dict):
        separator = b"{"
        for name, item in value.items():
            yield separator + encode(name) + b":"
            yield from json_pieces(item)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):
        separator = b"["
        for item in value:
            yield separator
            yield from json_pieces(item)
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    else:
        yield encode(value)


@dataclass(slots=True, eq=False)
class Choice:
    """One of the `choices` of a response, and how much of it has been sent."""

    index: int
    prompt: OutputProcessor
    answer: Answer
    echoes: bool  # its prompt still has to be sent
    num_sent: int = 0  # tokens
    offset: int = 0  # characters sent
    prefix: bytes = b""  # its events up to the text
    last_at: float = 0.0  # when its last token came; 0.0 before the first

    @property
    def num_tokens(self) -> int:
        return len(self.answer.output.token_ids)


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    # The first choice of each prompt.
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.prompt.prompt_token_ids) for choice in firsts)
    num_output = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.answer.record.num_cached_tokens for choice in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    details = {}
    if any(choice.answer.reader is not None for choice in choices):
        details["reasoning_tokens"] = sum(choice.answer.num_reasoning_tokens for choice in choices)
    records = [choice.answer.record for choice in choices]
    if any(record.num_accepted_prediction_tokens is not None for record in records):
        accepted = sum(record.num_accepted_prediction_tokens or 0 for record in records)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = sum(
            record.num_rejected_prediction_tokens for record in records
        )
    if details:
        usage["completion_tokens_details"] = details
    return usage


class ResponseFormatter:
    """Writes answers. Each method takes what is new from the choices itself; subclasses write the format of one API."""

    content_type = b"text/event-stream; charset=utf-8"
    headers: tuple[tuple[bytes, bytes], ...] = ()  # in addition to those of every stream

    def opening(self, choices: list[Choice]) -> bytes:
        """Return the first events of a stream."""
        raise NotImplementedError

    def more(self, choice: Choice) -> bytes:
        """Return events with what is new in an answer, or b"" if there is nothing to send yet."""
        raise NotImplementedError

    def end(self, choice: Choice) -> bytes:
        """Return the last events of an answer."""
        raise NotImplementedError

    def closing(self, choices: list[Choice]) -> bytes:
        """Return the events after the last answer."""
        raise NotImplementedError

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        """Yield the body of a response without events, in pieces that take little time to encode."""
        raise NotImplementedError

    def ping(self) -> bytes:
        """Return what a silent stream sends to keep its connection open: by default an SSE comment."""
        return b": ping\n\n"

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return b"data: " + error.body() + b"\n\n"

    def error_response(self, error: ApiError) -> Response:
        """Return the response for a request that fails before anything was sent."""
        return error.response()


PartKind = Literal["reasoning", "text", "call"]


class PartWriter:
    """Writes an answer as a sequence of parts (reasoning, text, tool calls), each of which ends before the next starts.

    Turns the events of a parser into those of an API and collects the whole answer, so that both are the same.
    """

    def __init__(self) -> None:
        self._open: PartKind | None = None
        self._pieces: list[str] = []  # the text of the open part

    def write(self, events: Iterable[ParserEvent]) -> bytes:
        """Return the API's events for these."""
        return b"".join([self._write(event) for event in events])

    def finish(self, complete: bool) -> bytes:
        """Return the events that end the last part."""
        return self._end(complete)

    def _write(self, event: ParserEvent) -> bytes:
        match event:
            case ReasoningDelta(text):
                return self._more("reasoning", text)
            case ContentDelta(text):
                return self._more("text", text)
            case ToolCallBegun(_, name, call_id):
                return self._switch("call", name, call_id or f"call_{secrets.token_hex(12)}")
            case ArgumentsDelta(_, text):
                return self._more("call", text)
            case ToolCallEnded(_, complete):
                return self._end(complete)

    def _more(self, part_kind: PartKind, text: str) -> bytes:
        start = b"" if self._open == part_kind else self._switch(part_kind)
        self._pieces.append(text)
        return start + self._delta(part_kind, text)

    def _switch(self, part_kind: PartKind, name: str = "", call_id: str = "") -> bytes:
        ended = self._end(complete=True)
        self._open, self._pieces = part_kind, []
        return ended + self._begun(part_kind, name, call_id)

    def _end(self, complete: bool) -> bytes:
        if self._open is None:
            return b""
        part_kind, self._open = self._open, None
        return self._ended(part_kind, "".join(self._pieces), complete)

    # ---- for subclasses: the events of each API ----

    def _begun(self, part_kind: PartKind, name: str, call_id: str) -> bytes:
        raise NotImplementedError

    def _delta(self, part_kind: PartKind, text: str) -> bytes:
        raise NotImplementedError

    def _ended(self, part_kind: PartKind, text: str, complete: bool) -> bytes:
        raise NotImplementedError
