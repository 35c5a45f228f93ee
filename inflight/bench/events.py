"""The events of a streamed answer: when tokens came, how many, and how it ended."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_EVENT = 16 << 20  # bytes without an end of line


class _EventDelta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _EventChoice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _EventDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _EventUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_EventChoice] = []
    usage: _EventUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamError(Exception):
    """The stream is not what it should be."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class EventReader:
    """Reads the bytes of one stream, however they are cut. Only bytes are cut, never characters: an event is decoded
    once its line is complete."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of events that brought tokens
        self.num_seen = 0  # tokens, as far as events tell: one each, unless they list ids
        self.usage: _EventUsage | None = None
        self.finished = False  # a finish reason was told
        self.done = False  # the end mark came
        self.ended = 0.0  # when the whole answer had been read; set by whoever reads
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that were read at `now`."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line[:5] == b"data:":
                self._event(line[5:], now)
        if len(self._rest) > MAX_EVENT:
            raise StreamError("bad_response", f"an event is longer than {MAX_EVENT} bytes")

    def _event(self, payload: bytes, now: float) -> None:
        try:
            event = _decode(payload)
        except msgspec.MsgspecError as error:
            if payload.strip() == b"[DONE]":
                self.done = True
                return
            raise StreamError("bad_response", f"an event cannot be read: {error}") from None
        if event.error is not None:
            raise StreamError("stream_error", message_of(event.error))
        num_tokens = 0
        for choice in event.choices:
            delta = choice.delta
            if choice.token_ids:
                num_tokens += len(choice.token_ids)
            elif choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                num_tokens += 1
            if choice.finish_reason is not None:
                self.finished = True
        if num_tokens:
            self.times.append(now)
            self.num_seen += num_tokens
        if event.usage is not None:
            self.usage = event.usage

    @property
    def num_tokens(self) -> int:
        """Of the answer: what the server says, or else what was seen."""
        return self.usage.completion_tokens if self.usage is not None else self.num_seen

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage is not None else 0

    @property
    def num_cached_tokens(self) -> int:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


def message_of(error: Any) -> str:
    """What an error object says."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message if message is not None else error)[:300]
