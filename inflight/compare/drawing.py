"""The picture as rectangles and texts in pixels, for whatever writes them to a file.

A paint is a colour (#rrggbb) or one of the names below, which files that know light and dark mode resolve late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from inflight.compare.axis import Axis, StepAxis, TimeAxis, ticks
from inflight.compare.layout import SpanKind, Timeline
from inflight.compare.palette import decode_colour, prefill_colour
from inflight.compare.shown import Shown

TITLE = "Who held which slot"
WIDTH = 1200
LEFT, RIGHT = 64, 20
PANEL = 190  # height of a panel's slots, where their number allows it
MIN_ROW, MAX_ROW = 3, 22
MIN_PREFILL = 2.0  # pixels: a prompt's step must not vanish in a long run
SAMPLE = (26, 12)  # width and height of what a legend shows
CHARACTER = 6.4  # pixels, about, at the size of labels

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2024",
    "muted": "#687076",
    "rule": "#c9ced3",
    "slot": "#f0f2f4",
    "held": "#d5d9dd",
    "label": "#16181a",
}
DARK = {
    "paper": "#15181b",
    "ink": "#eceef0",
    "muted": "#9ba1a6",
    "rule": "#3f464c",
    "slot": "#22272b",
    "held": "#454c53",
    "label": "#16181a",
}


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    paint: str
    title: str = ""  # what hovering tells


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  # of the base line
    text: str
    paint: str = "ink"
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(slots=True)
class Drawing:
    width: float
    height: float
    items: list[Rect | Text] = field(default_factory=list)


def draw(comparison: Shown, heading: bool = True) -> Drawing:
    """The whole run over time, then its first steps one by one. Heading and legend are for a picture that stands
    alone."""
    pen = _Pen(comparison)
    if heading:
        pen.heading(TITLE, comparison.subtitle)
        pen.legend()
    pen.section(TimeAxis.over(comparison.timelines), "The whole run, all on one time scale")
    longest = max(timeline.num_steps for timeline in comparison.timelines)
    first = min(comparison.close_steps, longest)
    pen.section(StepAxis(first), f"A closer look: the first {first} steps of each")
    return pen.drawing


class _Pen:
    """Draws from top to bottom."""

    def __init__(self, comparison: Shown) -> None:
        self.comparison = comparison
        self.drawing = Drawing(WIDTH, 0)
        rows = comparison.num_slots
        self.row = min(max(PANEL / rows, MIN_ROW), MAX_ROW)
        self.y = 0.0

    def heading(self, title: str, subtitle: str) -> None:
        self.drawing.items += [
            Text(LEFT, self.y + 34, title, size=20, bold=True),
            Text(LEFT, self.y + 56, subtitle, "muted", 13),
        ]
        self._advance(66)

    def legend(self) -> None:
        x, y = float(LEFT), self.y + 12
        for kind, name, _ in self.comparison.legend:
            self.drawing.items += sample(kind, x, y)
            self.drawing.items.append(Text(x + 33, y + 11, name, "muted", 12))
            x += 33 + CHARACTER * len(name) + 26
        self._advance(34)

    def section(self, axis: Axis, title: str) -> None:
        self.drawing.items.append(Text(LEFT, self.y + 26, title, size=15, bold=True))
        self._advance(32)
        for timeline in self.comparison.timelines:
            self._panel(timeline, axis)
        self._advance(14)

    def _panel(self, timeline: Timeline, axis: Axis) -> None:
        self._panel_title(timeline, axis)
        top, height = self.y, self.row * timeline.num_slots
        gap = 1.0 if self.row >= 5 else 0.0
        scale = (WIDTH - LEFT - RIGHT) / axis.limit
        for slot in range(timeline.num_slots):
            y = top + slot * self.row
            self.drawing.items.append(Rect(LEFT, y, WIDTH - LEFT - RIGHT, self.row - gap, "slot"))
            if self.row >= 9:
                self.drawing.items.append(
                    Text(LEFT - 8, y + self.row / 2 + 3.5, str(slot + 1), "muted", 10, "end")
                )
        self._spans(timeline, axis, scale, top, gap)
        end = axis.end(timeline)
        if end <= axis.limit:
            self.drawing.items.append(Rect(LEFT + end * scale - 0.75, top - 3, 1.5, height + 5, "ink"))
        self._advance(height)
        self._ticks(axis, scale)

    def _panel_title(self, timeline: Timeline, axis: Axis) -> None:
        told, y = self.comparison.told(timeline.strategy), self.y + 18
        name = Text(LEFT, y, timeline.strategy, size=14, bold=True)
        self.drawing.items += [name, Text(LEFT + 12 + 8.2 * len(name.text), y, told, "muted")]
        if axis.end(timeline) > axis.limit:
            moment = axis.limit if isinstance(axis, TimeAxis) else timeline.ends[int(axis.limit) - 1]
            done, end = timeline.num_done(moment), axis.end(timeline)
            shown = f"{end:,.2f} s" if isinstance(axis, TimeAxis) else f"step {end:,.0f}"
            note = f"{done} of {self.comparison.num_requests} requests done here; goes on to {shown}"
            self.drawing.items.append(Text(WIDTH - RIGHT, y, note, "ink", 12, "end"))
        self._advance(26)

    def _spans(self, timeline: Timeline, axis: Axis, scale: float, top: float, gap: float) -> None:
        over: list[Rect | Text] = []  # drawn last: marks that must not be covered
        for index, span in enumerate(timeline.spans):
            low, high = axis.interval(timeline, span)
            if low >= axis.limit:
                continue
            x, y = LEFT + low * scale, top + span.slot * self.row
            width, height = (min(high, axis.limit) - low) * scale, self.row - gap
            title = self.comparison.about(span)
            if span.kind is not SpanKind.PREFILL:
                self.drawing.items += _cell(span.kind, x, y, width, height, span.request, title)
            else:
                width = max(width, MIN_PREFILL)
                over += _cell(span.kind, x, y, width, height, span.request, title)
                over += self._label(timeline, index, axis, scale, y)
        self.drawing.items += over

    def _label(self, timeline: Timeline, index: int, axis: Axis, scale: float, y: float) -> list[Text]:
        """The request's letter, right behind its prompt, where there is room before the next request."""
        spans = timeline.spans
        if self.row < 9 or index + 1 == len(spans):
            return []
        span, following = spans[index], spans[index + 1]
        if following.kind is not SpanKind.DECODE or following.request != span.request:
            return []
        text = self.comparison.label(span.request)
        low, high = axis.interval(timeline, following)
        if (min(high, axis.limit) - low) * scale < CHARACTER * len(text) + 5:
            return []
        return [Text(LEFT + low * scale + 3, y + self.row / 2 + 3.5, text, "label", 10, bold=True)]

    def _ticks(self, axis: Axis, scale: float) -> None:
        for number in ticks(axis.limit):
            x = LEFT + number * scale
            self.drawing.items.append(Rect(x, self.y, 1, 4, "rule"))
            text = f"{number:g} {axis.unit}" if number == 0 else f"{number:g}"
            self.drawing.items.append(Text(x, self.y + 15, text, "muted", 10, "middle"))
        self._advance(24)

    def _advance(self, height: float) -> None:
        self.y += height
        self.drawing.height = self.y


def sample(kind: SpanKind | None, x: float = 0, y: float = 0) -> list[Rect]:
    """What a legend shows of a kind."""
    return _cell(kind, x, y, *SAMPLE, 0, "")


def _cell(
    kind: SpanKind | None, x: float, y: float, width: float, height: float, request: int, title: str
) -> list[Rect]:
    if kind is SpanKind.HELD:
        return _held(x, y, width, height, request, title)
    paint = {
        SpanKind.PREFILL: prefill_colour(request),
        SpanKind.DECODE: decode_colour(request),
        SpanKind.PADDING: "held",
        None: "slot",
    }
    return [Rect(x, y, width, height, paint[kind], title)]


def _held(x: float, y: float, width: float, height: float, request: int, title: str) -> list[Rect]:
    """A grey slot with a thin thread in the colour of the request that keeps it."""
    thread = max(1.0, height / 6)
    return [
        Rect(x, y, width, height, "held", title),
        Rect(x, y + (height - thread) / 2, width, thread, decode_colour(request), title),
    ]
