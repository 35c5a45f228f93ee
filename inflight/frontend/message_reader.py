"""The answer to a conversation as it grows: what the model thinks, says and calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from inflight.agents import (
    ArgumentsDelta,
    MessageParser,
    ParsedMessage,
    ParserEvent,
    ToolCallBegun,
    ToolCallEnded,
)
from inflight.agents.events import merge_deltas
from inflight.outputs import AssistantMessage, CompletionOutput, ToolCall


class MessageReader:
    """Fed by its answer, read by whoever writes a response."""

    def __init__(
        self,
        parser: MessageParser,
        output: CompletionOutput,
        complete: Callable[[], None],
        max_calls: int | None = None,
    ) -> None:
        """`complete` brings the answer up to date. Calls beyond `max_calls` are left out."""
        self.message = ParsedMessage()  # so far
        self.num_reasoning_tokens = 0  # of the output; the markers around the reasoning are counted too
        self._parser, self._output, self._complete, self._max_calls = parser, output, complete, max_calls
        self._events: list[ParserEvent] = []
        self._ended = False

    @property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that it has to see."""
        return self._parser.marker_ids

    def take(self) -> list[ParserEvent]:
        """What is new since it was last taken; all that was held back once the answer has ended."""
        self._complete()
        events, self._events = self._events, []
        return events if len(events) < 2 else merge_deltas(events)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended: "tool_calls" if it ended by itself, and not inside a call, whose arguments would be
        broken."""
        reason, calls = self._output.finish_reason, self.message.tool_calls
        return "tool_calls" if reason == "stop" and calls and calls[-1].complete else reason

    def assistant_message(self) -> AssistantMessage:
        """The message so far."""
        found = self.message
        calls = tuple(ToolCall(call.id or "", call.name, call.arguments) for call in found.tool_calls)
        content = None if calls and not found.content else found.content
        return AssistantMessage(content, found.reasoning or None, calls)

    # ---- the answer's side ----

    def pieces(self, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Token ids as they are to be fed: one by one, so that those of the reasoning are counted the same however
        they come."""
        return (token_ids[at : at + 1] for at in range(len(token_ids)))

    def feed(self, text: str, token_ids: Sequence[int]) -> None:
        """The next tokens, and the text that they complete."""
        was_reasoning = self._parser.in_reasoning
        self._add(self._parser.feed(text, token_ids))
        if was_reasoning or self._parser.in_reasoning:
            self.num_reasoning_tokens += len(token_ids)

    def finish(self, text: str = "") -> None:
        """There will be no more, but for this text, which was held back. May be called again."""
        if not self._ended:
            self._ended = True
            self._add(self._parser.feed(text))
            self._add(self._parser.finish())

    def _add(self, events: list[ParserEvent]) -> None:
        for event in events:
            if isinstance(event, ToolCallBegun) and event.id is None:
                event = replace(event, id=f"call_{secrets.token_hex(12)}")
            if self._is_wanted(event):
                self._events.append(event)
                self.message.add((event,))

    def _is_wanted(self, event: ParserEvent) -> bool:
        if self._max_calls is None or not isinstance(event, ToolCallBegun | ArgumentsDelta | ToolCallEnded):
            return True
        return event.index < self._max_calls
