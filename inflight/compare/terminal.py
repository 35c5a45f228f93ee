"""The table and the picture in a terminal: one line per slot, one column per interval of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from inflight.compare.picture import decode_colour, prefill_colour
from inflight.compare.timeline import ComparisonView, SpanKind, TimeAxis, Timeline, ticks

GUTTER = 4  # columns for the slots' numbers
MIN_COLUMNS = 10
FOLD = 2  # if more slots than this are never used, they share one line

# How spans are told apart without colour.
_MARKS = {SpanKind.PREFILL: "▓", SpanKind.DECODE: "━", SpanKind.HELD: "·", SpanKind.PADDING: "·", None: " "}
_ASCII_MARKS = {
    SpanKind.PREFILL: "#",
    SpanKind.DECODE: "-",
    SpanKind.HELD: ".",
    SpanKind.PADDING: ".",
    None: " ",
}
_WASTED = (SpanKind.HELD, SpanKind.PADDING)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One column of one slot: the request and kind that took most of it."""

    request: int = -1
    kind: SpanKind | None = None


def print_comparison(comparison: ComparisonView, console: Console) -> None:
    console.print(comparison.subtitle, highlight=False)
    console.print()
    for line in picture(comparison, console):
        # Keep Rich from wrapping at the last column and from highlighting numbers.
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    console.print(table(comparison))
    console.print(comparison.verdict, highlight=False)


def table(comparison: ComparisonView) -> Table:
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("")
    for timeline in comparison.timelines:
        grid.add_column(timeline.strategy, justify="right")
    for name, cells in comparison.rows():
        grid.add_row(name, *cells)
    return grid


def picture(comparison: ComparisonView, console: Console) -> Iterator[Text]:
    """Draw every strategy's slots on the same time scale, as wide as the console."""
    axis = TimeAxis.over(comparison.timelines)
    num_columns = max(console.width - GUTTER, MIN_COLUMNS)
    coloured = console.color_system is not None
    marks = _ASCII_MARKS if console.options.ascii_only else _MARKS
    yield _legend(comparison, coloured, marks)
    for timeline in comparison.timelines:
        yield Text()
        yield _title(comparison, timeline, axis)
        cells = _columns(timeline, axis, num_columns)
        unused = timeline.num_slots - timeline.num_slots_used
        shown = timeline.num_slots_used if unused > FOLD else timeline.num_slots
        for slot in range(shown):
            line = Text(f"{slot + 1:>{GUTTER - 1}} ", style="dim")
            yield line.append_text(_slot_line(comparison, cells[slot], coloured, marks))
        if shown < timeline.num_slots:
            yield Text(f"{shown + 1:>{GUTTER - 1}} to {timeline.num_slots}: never used", style="dim")
    yield _axis_line(axis, num_columns)


def _title(comparison: ComparisonView, timeline: Timeline, axis: TimeAxis) -> Text:
    text = Text(timeline.strategy, style="bold")
    text.append(f"  {comparison.short_summary(timeline.strategy)}", style="not bold")
    if timeline.duration > axis.limit:
        num_done = timeline.num_done(axis.limit)
        text.append(f"; shown up to {axis.limit:.2f} s, {num_done} done", style="not bold dim")
    return text


def _columns(timeline: Timeline, axis: TimeAxis, num_columns: int) -> list[list[_Cell]]:
    """Return, for every slot, what took most of each column.

    The beginning of a request is always visible, however short its prompt is.
    """
    cells = [[_Cell()] * num_columns for _ in range(timeline.num_slots)]
    taken = [[0.0] * num_columns for _ in range(timeline.num_slots)]
    width = axis.limit / num_columns
    for span in timeline.spans:
        low, high = axis.interval(timeline, span)
        line, most = cells[span.slot], taken[span.slot]
        for column in range(int(low / width), num_columns):
            share = min(high, (column + 1) * width) - max(low, column * width)
            if share <= 0:
                break
            if line[column].request == span.request:  # the same request, earlier in this column
                line[column] = _Cell(span.request, span.kind)
                most[column] += share
            elif share > most[column]:
                line[column], most[column] = _Cell(span.request, span.kind), share
    for line in cells:
        for column, (before, cell) in enumerate(zip([_Cell(), *line], line, strict=False)):
            if cell.kind is SpanKind.DECODE and before.request != cell.request:
                line[column] = _Cell(cell.request, SpanKind.PREFILL)
    return cells


def _slot_line(
    comparison: ComparisonView, line: list[_Cell], coloured: bool, marks: dict[SpanKind | None, str]
) -> Text:
    text = Text()
    column = 0
    while column < len(line):
        end = column
        while end < len(line) and line[end].request == line[column].request:
            end += 1
        run = line[column:end]
        working = sum(cell.kind not in _WASTED for cell in run)
        label = comparison.label(run[0].request) if run[0].kind else ""
        label = label if len(label) <= working else ""
        for offset, cell in enumerate(run):
            letter = label[offset] if offset < len(label) else ""
            text.append(letter or _mark(cell, coloured, marks), _style(cell, coloured))
        column = end
    return text


def _mark(cell: _Cell, coloured: bool, marks: dict[SpanKind | None, str]) -> str:
    return " " if coloured and cell.kind in (SpanKind.PREFILL, SpanKind.DECODE) else marks[cell.kind]


def _style(cell: _Cell, coloured: bool) -> Style:
    if not coloured or cell.kind is None:
        return Style()
    if cell.kind in _WASTED:
        return Style(color="bright_black")
    if cell.kind is SpanKind.PREFILL:
        return Style(color="#ffffff", bgcolor=prefill_colour(cell.request), bold=True)
    return Style(color="#101214", bgcolor=decode_colour(cell.request))


def _legend(comparison: ComparisonView, coloured: bool, marks: dict[SpanKind | None, str]) -> Text:
    text = Text()
    for entry in comparison.legend:
        if entry.short_text:
            cell = _Cell(0, entry.kind)
            text.append(_mark(cell, coloured, marks) * 2, _style(cell, coloured))
            text.append(f" {entry.short_text}   ")
    return text


def _axis_line(axis: TimeAxis, num_columns: int) -> Text:
    line = [" "] * (GUTTER + num_columns)
    for number in ticks(axis.limit, max(2, num_columns // 10)):
        text = f"{number:g} s"
        at = GUTTER + int(number / axis.limit * (num_columns - 1))
        if at + len(text) <= len(line):
            line[at : at + len(text)] = text
    return Text("".join(line).rstrip(), style="dim")
