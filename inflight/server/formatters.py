"""What turns answers into a response, whole or as events. There is a subclass for each API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from inflight.agents import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.frontend import MessageReader, OutputProcessor
from inflight.frontend.output_processor import Answer
from inflight.server.errors import ApiError

encode = msgspec.json.encode


def json_pieces(value: Any) -> Iterator[bytes]:
    """Write the JSON of a value in pieces. Objects are cut between their items; an iterator is an array, made and cut
    item by item, where `msgspec.Raw` may be several items with commas between them; other values are one piece."""
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
    """An answer as one of the `choices` of a response, and how much of it has been sent."""

    index: int
    prompt: OutputProcessor
    answer: Answer
    echoes: bool  # its prompt is still to be sent
    num_sent: int = 0  # tokens
    offset: int = 0  # characters sent
    prefix: bytes = b""  # of its events
    last_at: float = 0.0  # when its last token came; 0.0 before the first

    @property
    def num_tokens(self) -> int:
        return len(self.answer.output.token_ids)

    @property
    def reader(self) -> MessageReader | None:
        """Of chats in which there may be more than plain content."""
        return self.answer.reader

    def take(self) -> list[ParserEvent]:
        """What is new in it since it was last taken, whether or not there may be more than plain content."""
        if self.reader is not None:
            return self.reader.take()
        text = self.answer.take_text()
        return [ContentDelta(text)] if text else []

    @property
    def finish_reason(self) -> str | None:
        reader = self.reader
        return self.answer.output.finish_reason if reader is None else reader.finish_reason


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()  # of each prompt
    num_prompt = sum(len(choice.prompt.prompt_token_ids) for choice in firsts)
    num_output = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.answer.record.num_cached_tokens for choice in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    readers = [choice.reader for choice in choices if choice.reader is not None]
    if readers:
        num_reasoning = sum(reader.num_reasoning_tokens for reader in readers)
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


class ResponseFormatter:
    """Takes what is new from answers by itself, when it is asked to write it."""

    content_type = b"text/event-stream; charset=utf-8"  # of events
    headers: tuple[tuple[bytes, bytes], ...] = ()  # beside those that every stream has

    def opening(self, choices: list[Choice]) -> bytes:
        """The events before anything else."""
        raise NotImplementedError

    def more(self, choice: Choice) -> bytes:
        """What is new in an answer, or b"" where there is nothing to send yet."""
        raise NotImplementedError

    def end(self, choice: Choice) -> bytes:
        """The last events of an answer."""
        raise NotImplementedError

    def closing(self, choices: list[Choice]) -> bytes:
        """What comes after the last answer."""
        raise NotImplementedError

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        """The body of a response without events, in pieces that take little time to make."""
        raise NotImplementedError

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks off."""
        return b"data: " + error.body() + b"\n\n"

    def error_response(self, error: ApiError) -> Response:
        """What comes instead of all that."""
        return error.response()


PartKind = Literal["reasoning", "text", "call"]


class PartWriter:
    """Turns a parser's events into an API's, and keeps what they add up to: streamed and whole are the same."""

    def __init__(self) -> None:
        self._open: PartKind | None = None
        self._pieces: list[str] = []  # of the open part's text

    def write(self, events: Iterable[ParserEvent]) -> bytes:
        """What the API says to these."""
        return b"".join([self._write(event) for event in events])

    def finish(self, complete: bool) -> bytes:
        """The end of the last part."""
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

    def _more(self, kind: PartKind, text: str) -> bytes:
        begun = b"" if self._open == kind else self._switch(kind)
        self._pieces.append(text)
        return begun + self._delta(kind, text)

    def _switch(self, kind: PartKind, name: str = "", call_id: str = "") -> bytes:
        ended = self._end(complete=True)
        self._open, self._pieces = kind, []
        return ended + self._begun(kind, name, call_id)

    def _end(self, complete: bool) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        return self._ended(kind, "".join(self._pieces), complete)

    # ---- what each API writes ----

    def _begun(self, kind: PartKind, name: str, call_id: str) -> bytes:
        raise NotImplementedError

    def _delta(self, kind: PartKind, text: str) -> bytes:
        raise NotImplementedError

    def _ended(self, kind: PartKind, text: str, complete: bool) -> bytes:
        raise NotImplementedError
