"""The table and the picture in a terminal: one line per slot, one column per interval of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from inflight.bench.compare.timeline import ComparisonView, Timeline, shown_seconds, ticks
from inflight.timeline.chunks import SlotKind
from inflight.timeline.terminal import Bar, Cell, slot_cells

GUTTER = 4  # columns for the slots' numbers
MIN_COLUMNS = 10
FOLD = 2  # if more slots than this are never used, they share one line

# Marks that distinguish spans without colour.
Marks = dict[SlotKind, str]
_MARKS = {SlotKind.PREFILL: "▓", SlotKind.DECODE: "━", SlotKind.HELD: "·", SlotKind.PADDING: "·"}
_ASCII_MARKS = {SlotKind.PREFILL: "#", SlotKind.DECODE: "-", SlotKind.HELD: ".", SlotKind.PADDING: "."}
# An answer's colour and its prompt's, told apart also by people who confuse red and green.
_COLOURS = (
    ("#4ba3e3", "#00558a"),
    ("#f0b43c", "#8a5700"),
    ("#3cc79b", "#006e50"),
    ("#e08fbd", "#8a3c66"),
    ("#8fd0f5", "#25658f"),
    ("#f2824a", "#8f3900"),
    ("#a99df0", "#544b8f"),
)
_WASTED = (SlotKind.HELD, SlotKind.PADDING)


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
    seconds = shown_seconds(comparison.timelines)
    num_columns = max(console.width - GUTTER, MIN_COLUMNS)
    coloured = console.color_system is not None
    marks = _ASCII_MARKS if console.options.ascii_only else _MARKS
    yield _legend(comparison, coloured, marks)
    for timeline in comparison.timelines:
        yield Text()
        yield _title(comparison, timeline, seconds)
        cells, empty = _cells(timeline, seconds, num_columns), [None] * num_columns
        unused = timeline.num_slots - timeline.num_slots_used
        shown = timeline.num_slots_used if unused > FOLD else timeline.num_slots
        for slot in range(shown):
            line = Text(f"{slot + 1:>{GUTTER - 1}} ", style="dim")
            yield line.append_text(_slot_line(comparison, cells.get(slot, empty), coloured, marks))
        if shown < timeline.num_slots:
            yield Text(f"{shown + 1:>{GUTTER - 1}} to {timeline.num_slots}: never used", style="dim")
    yield _axis_line(seconds, num_columns)


def _title(comparison: ComparisonView, timeline: Timeline, seconds: float) -> Text:
    text = Text(timeline.strategy, style="bold")
    text.append(f"  {comparison.summary(timeline.strategy)}", style="not bold")
    if timeline.duration > seconds:
        num_done = timeline.num_done(seconds)
        text.append(f"; shown up to {seconds:.2f} s, {num_done} done", style="not bold dim")
    return text


def _cells(timeline: Timeline, seconds: float, num_columns: int) -> dict[int, list[Cell | None]]:
    """Return the columns of every slot that is used in the seconds shown."""
    bars: list[Bar] = []
    for span in timeline.spans:
        begin, end = timeline.interval(span)
        if begin < seconds:
            bars.append(Bar(span.slot, span.request, span.kind, begin / seconds, end / seconds))
    return slot_cells(bars, num_columns)


def _slot_line(comparison: ComparisonView, line: Sequence[Cell | None], coloured: bool, marks: Marks) -> Text:
    text = Text()
    for request, group in groupby(line, key=lambda cell: None if cell is None else cell.request):
        cells = list(group)
        num_working = sum(cell is not None and cell.kind not in _WASTED for cell in cells)
        label = "" if request is None else comparison.label(request)
        if len(label) > num_working:
            label = ""
        for cell, letter in zip_longest(cells, label[: len(cells)]):
            text.append(letter or _mark(cell, coloured, marks), _style(cell, coloured))
    return text


def _mark(cell: Cell | None, coloured: bool, marks: Marks) -> str:
    if cell is None or (coloured and cell.kind not in _WASTED):
        return " "
    return marks[cell.kind]


def _style(cell: Cell | None, coloured: bool) -> Style:
    if not coloured or cell is None:
        return Style()
    if cell.kind in _WASTED:
        return Style(color="bright_black")
    answer, prompt = _COLOURS[cell.request % len(_COLOURS)]
    if cell.kind is SlotKind.PREFILL:
        return Style(color="#ffffff", bgcolor=prompt, bold=True)
    return Style(color="#101214", bgcolor=answer)


def _legend(comparison: ComparisonView, coloured: bool, marks: Marks) -> Text:
    text = Text()
    for entry in comparison.legend:
        if entry.short_text:
            cell = None if entry.kind is None else Cell(0, entry.kind)
            text.append(_mark(cell, coloured, marks) * 2, _style(cell, coloured))
            text.append(f" {entry.short_text}   ")
    return text


def _axis_line(seconds: float, num_columns: int) -> Text:
    line = [" "] * (GUTTER + num_columns)
    for number in ticks(seconds, max(2, num_columns // 10)):
        text = f"{number:g} s"
        column = GUTTER + int(number / seconds * (num_columns - 1))
        if column + len(text) <= len(line):
            line[column : column + len(text)] = text
    return Text("".join(line).rstrip(), style="dim")
