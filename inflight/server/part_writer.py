"""An answer as a row of parts: thoughts, text, calls. Each begins, grows and ends before the next one begins."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Literal

from inflight.agents import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
)

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
