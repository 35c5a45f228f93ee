"""Reasoning between two markers, before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.agents.events import ReasoningDelta
from inflight.agents.source import Markers, Reading, Source


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """What a block of reasoning begins and ends with."""

    open: str
    close: str

    def opened(self, prompt: str) -> str:
        """The beginning of a block that a prompt ends with, so that the output starts inside it."""
        return self.open if prompt.rstrip().endswith(self.open) else ""


# By name. Reasoning on channels of harmony is no block, and is read with the rest of that format.
THINKING = {
    "think": ThinkingMarkers("<think>", "</think>"),
    "mistral": ThinkingMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ThinkingMarkers("<seed:think>", "</seed:think>"),
    "kimi_vl": ThinkingMarkers("◁think▷", "◁/think▷"),
}
HARMONY_REASONING = "harmony"
REASONING_FORMATS = (*THINKING, HARMONY_REASONING)


def read_thinking(source: Source, markers: ThinkingMarkers, also_ends: tuple[str, ...] = ()) -> Reading[None]:
    """The block at the beginning of an output, if there is one, without the white space at its edges.

    Later in the output the markers are text: an answer may be about them. `also_ends` are markers that end the block
    and are left for the next reader.
    """
    source.hold()
    yield from source.skip_space()
    if not (yield from source.accept(markers.open)):
        source.rewind()
        return
    source.release()
    source.in_reasoning = True
    yield from source.accept_after_space(markers.open)  # some models open what the prompt has opened
    yield from source.skip_space()
    ending = yield from source.until(Markers(markers.close, *also_ends), ReasoningDelta, trim=True)
    source.in_reasoning = False
    if ending is not None and not ending.endswith(markers.close):
        source.back(len(ending.lstrip()))
    yield from source.skip_space()
