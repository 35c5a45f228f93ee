"""Helpers that stream an output in pieces and check its events."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
    ToolCallEnded,
    merge_deltas,
)


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[start:end] for start, end in pairwise(borders)]


def streamed(parser: MessageParser, deltas: Iterable[str]) -> list[ParserEvent]:
    """Return all events with consecutive deltas merged, so that they do not depend on the cuts."""
    return merge_deltas(chain(*map(parser.feed, deltas), parser.finish()))


def check_sane(events: Iterable[ParserEvent]) -> None:
    """Check that calls are numbered from 0, do not overlap and end, and that no event is empty."""
    next_index, open_call = 0, False
    for event in events:
        match event:
            case ToolCallBegun(index, name):
                assert (index, open_call) == (next_index, False)
                assert name
                next_index, open_call = next_index + 1, True
            case ArgumentsDelta(index, text):
                assert (index, open_call) == (next_index - 1, True)
                assert text
            case ToolCallEnded(index):
                assert (index, open_call) == (next_index - 1, True)
                open_call = False
            case ContentDelta(text) | ReasoningDelta(text):
                assert not open_call
                assert text
    assert not open_call
