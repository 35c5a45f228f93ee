"""The slots of every strategy as a drawing: one row per slot, one colour per request."""

from __future__ import annotations

import math

from inflight.bench.compare.drawing import Drawing, Rect, Text
from inflight.bench.compare.timeline import Axis, ComparisonView, StepAxis, TimeAxis, Timeline, ticks
from inflight.timeline.chunks import SlotKind

TITLE = "Which request held which slot"
WIDTH = 1200
LEFT, RIGHT = 64, 20
PANEL = 190  # height of a panel's slots, if their number allows it
MIN_ROW, MAX_ROW = 3, 22
MIN_PREFILL = 2.0  # pixels: a prompt's step must stay visible in a long run
SAMPLE = (26, 12)  # width and height of a legend's sample
CHARACTER = 6.4  # approximate width of a character in labels, in pixels

GOLDEN_ANGLE = 137.508  # degrees: consecutive requests are far apart in hue, however many there are
DECODE = (0.78, 0.115)  # lightness and chroma in OKLCH, readable in both light and dark mode
PREFILL = (0.50, 0.13)


def draw(comparison: ComparisonView) -> Drawing:
    """Draw the whole run over time, then a close-up of its first steps."""
    pen = _Pen(comparison)
    pen.heading(TITLE, comparison.subtitle)
    pen.legend()
    pen.section(
        TimeAxis.from_timelines(comparison.timelines), "The whole run, all strategies on the same time scale"
    )
    longest = max(timeline.num_steps for timeline in comparison.timelines)
    first = min(comparison.close_steps, longest)
    pen.section(StepAxis(first), f"Close-up: the first {first} steps of each strategy")
    return pen.drawing


class _Pen:
    """Draws from top to bottom."""

    def __init__(self, comparison: ComparisonView) -> None:
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
        for entry in self.comparison.legend:
            self.drawing.items += _cell(entry.kind, x, y, *SAMPLE, 0, "")
            self.drawing.items.append(Text(x + 33, y + 11, entry.text, "muted", 12))
            x += 33 + CHARACTER * len(entry.text) + 26
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
        y = self.y + 18
        name = Text(LEFT, y, timeline.strategy, size=14, bold=True)
        summary = self.comparison.summary(timeline.strategy)
        self.drawing.items += [name, Text(LEFT + 12 + 8.2 * len(name.text), y, summary, "muted")]
        if axis.end(timeline) > axis.limit:
            moment = axis.limit if isinstance(axis, TimeAxis) else timeline.ends[int(axis.limit) - 1]
            num_done, end = timeline.num_done(moment), axis.end(timeline)
            until = f"{end:,.2f} s" if isinstance(axis, TimeAxis) else f"step {end:,.0f}"
            note = f"{num_done} of {self.comparison.num_requests} requests done here; continues to {until}"
            self.drawing.items.append(Text(WIDTH - RIGHT, y, note, "ink", 12, "end"))
        self._advance(26)

    def _spans(self, timeline: Timeline, axis: Axis, scale: float, top: float, gap: float) -> None:
        on_top: list[Rect | Text] = []  # drawn last so that nothing covers them
        for index, span in enumerate(timeline.spans):
            low, high = axis.interval(timeline, span)
            if low >= axis.limit:
                continue
            x, y = LEFT + low * scale, top + span.slot * self.row
            width, height = (min(high, axis.limit) - low) * scale, self.row - gap
            title = self.comparison.describe_span(span)
            if span.kind is not SlotKind.PREFILL:
                self.drawing.items += _cell(span.kind, x, y, width, height, span.request, title)
            else:
                width = max(width, MIN_PREFILL)
                on_top += _cell(span.kind, x, y, width, height, span.request, title)
                on_top += self._label(timeline, index, axis, scale, y)
        self.drawing.items += on_top

    def _label(self, timeline: Timeline, index: int, axis: Axis, scale: float, y: float) -> list[Text]:
        """Return the request's letter right after its prompt if there is space before the next request."""
        spans = timeline.spans
        if self.row < 9 or index + 1 == len(spans):
            return []
        span, following = spans[index], spans[index + 1]
        if following.kind is not SlotKind.DECODE or following.request != span.request:
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


def _cell(
    slot_kind: SlotKind | None, x: float, y: float, width: float, height: float, request: int, title: str
) -> list[Rect]:
    if slot_kind is SlotKind.HELD:
        return _held_cell(x, y, width, height, request, title)
    paint = {
        SlotKind.PREFILL: prefill_colour(request),
        SlotKind.DECODE: decode_colour(request),
        SlotKind.PADDING: "held",
        None: "slot",
    }
    return [Rect(x, y, width, height, paint[slot_kind], title)]


def _held_cell(x: float, y: float, width: float, height: float, request: int, title: str) -> list[Rect]:
    """Draw a grey slot with a thin line in the colour of the request that holds it."""
    line = max(1.0, height / 6)
    return [
        Rect(x, y, width, height, "held", title),
        Rect(x, y + (height - line) / 2, width, line, decode_colour(request), title),
    ]


# ---- colours ----


def decode_colour(index: int) -> str:
    return _hex(*DECODE, _hue(index))


def prefill_colour(index: int) -> str:
    """Return the request's hue in a darker shade."""
    return _hex(*PREFILL, _hue(index))


def _hue(index: int) -> float:
    return (25 + index * GOLDEN_ANGLE) % 360


def _hex(lightness: float, chroma: float, hue: float) -> str:
    """Convert OKLCH to #rrggbb. In OKLCH, equal lightness looks equally light in every hue."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(channel)):02x}" for channel in linear)


def _gamma(channel: float) -> float:
    channel = min(max(channel, 0.0), 1.0)
    return 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
