"""The timeline in a terminal: slots down, time across, the present on the right.

    slot 0  ▒████████▒█████████            ▒  a prompt is computed (prefill)
    slot 1     ▒██████████               █  a token is produced in each step (decode)
    queue        ▁▂▂▁                      ·  a finished request still holds the slot
                                           ░  others' requests have so many slots

The colour of a cell is that of its request. Which slots others have is not known: the lowest free ones are drawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from inflight.timeline.chunks import SlotKind, SlotRun

SPARKS = " ▁▂▃▄▅▆▇█"
CELLS = {SlotKind.PREFILL: "▒", SlotKind.DECODE: "█", SlotKind.HELD: "·"}
RANKS = {
    SlotKind.PREFILL: 3,
    SlotKind.DECODE: 2,
    SlotKind.HELD: 1,
    SlotKind.PADDING: 1,
}  # where a column has several
COLOURS = ("blue", "yellow", "cyan", "magenta", "green", "bright_blue", "bright_yellow", "bright_magenta")
OTHERS = ("░", "dim")
LABEL_WIDTH = 9
HEADER_LINES = 5


class Bar(NamedTuple):
    """What a slot did for a request; `begin` and `end` are shares of the picture's width."""

    slot: int
    request: int
    kind: SlotKind
    begin: float
    end: float


class Cell(NamedTuple):
    """One column of one slot."""

    request: int
    kind: SlotKind


def slot_cells(bars: Iterable[Bar], num_columns: int) -> dict[int, list[Cell | None]]:
    """Return the columns of every slot that was used.

    The beginning of a request is always visible: where a column has several bars, that of a prompt is shown.
    """
    rows: dict[int, list[Cell | None]] = {}
    for slot, request, slot_kind, begin, end in bars:
        row = rows.setdefault(slot, [None] * num_columns)
        first = min(num_columns - 1, max(0, int(begin * num_columns)))
        for column in range(first, max(first + 1, min(num_columns, math.ceil(end * num_columns)))):
            before = row[column]
            if before is None or RANKS[before.kind] <= RANKS[slot_kind]:
                row[column] = Cell(request, slot_kind)
    return rows


class ShownStep(NamedTuple):
    number: int
    begin: float
    end: float
    parts: tuple[int, ...]  # schedule, launch, device, update in microseconds
    tokens: int
    output: int
    running: int
    waiting: int
    used: int
    cached: int
    others: int


class ReplicaWindow:
    """The last seconds of one replica. Older steps and runs are forgotten."""

    def __init__(self, replica: str, seconds: float) -> None:
        self.replica = replica
        self.seconds = seconds
        self.slots = self.budget = self.blocks = 0
        self.steps: deque[ShownStep] = deque()
        self.runs: deque[SlotRun] = deque()
        self.failed: dict[int, str] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        self.slots, self.budget, self.blocks = chunk["slots"], chunk["budget"], chunk["kv"]["blocks"]
        columns = chunk["steps"]
        for index, number in enumerate(columns["step"]):
            parts = tuple(columns[name][index] for name in ("schedule", "launch", "device", "update"))
            begin = columns["at"][index]
            counts = (columns[name][index] for name in ShownStep._fields[4:])
            self.steps.append(ShownStep(number, begin, begin + sum(parts) / 1e6, parts, *counts))
        self.runs.extend(SlotRun(*values) for values in chunk["runs"])
        self.failed |= {int(number): text for number, text in chunk.get("failed", {}).items()}

    def forget_before(self, moment: float) -> None:
        while self.steps and self.steps[0].end < moment:
            self.failed.pop(self.steps.popleft().number, None)
        first = self.steps[0].number if self.steps else 0
        while self.runs and (not self.steps or self.runs[0].first_step + self.runs[0].num_steps <= first):
            self.runs.popleft()


class TimelineWindow:
    """The last seconds of all replicas."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.replicas: dict[str, ReplicaWindow] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of `GET /v1/steps`."""
        name = chunk["replica"]
        self.replicas.setdefault(name, ReplicaWindow(name, self.seconds)).add(chunk)

    def draw(self, now: float, width: int, height: int) -> Group:
        """Return the picture of the last seconds before `now`, for a terminal of this size."""
        names = sorted(self.replicas)
        num_lines = max(HEADER_LINES + 1, height // max(1, len(names)))
        lines: list[Text] = []
        for name in names:
            window = self.replicas[name]
            window.forget_before(now - self.seconds)
            lines += _Picture(window, now, width).lines(num_lines)
        return Group(*(lines or [Text("no steps yet", style="dim")]))


class _Picture:
    """One drawing of a replica."""

    def __init__(self, window: ReplicaWindow, now: float, width: int) -> None:
        self._window = window
        self._begin = now - window.seconds
        self._num_columns = max(10, width - LABEL_WIDTH - 1)
        self._ends = {step.number: step.end for step in window.steps}
        self._begins = {step.number: step.begin for step in window.steps}

    def _column(self, moment: float) -> int:
        share = (moment - self._begin) / self._window.seconds
        return min(self._num_columns - 1, max(0, int(share * self._num_columns)))

    def lines(self, num_lines: int) -> list[Text]:
        rows = self._rows()
        shown = sorted(rows)[: max(1, num_lines - HEADER_LINES)]
        lines = [self._summary(), self._step_times()]
        lines.append(self._sparkline("tokens/s", self._per_column("output")))
        lines.append(self._sparkline("queue", self._highest("waiting")))
        for slot in shown:
            lines.append(_line(f"slot {slot}", rows[slot]))
        hidden = len(rows) - len(shown)
        if hidden:
            lines.append(Text(f"{hidden} more slots are in use", style="dim"))
        return lines

    def _bars(self) -> Iterator[Bar]:
        for run in self._window.runs:
            last_step = run.first_step + run.num_steps - 1
            if last_step in self._ends:
                moments = self._begins.get(run.first_step, self._begin), self._ends[last_step]
                begin, end = ((moment - self._begin) / self._window.seconds for moment in moments)
                yield Bar(run.slot, run.request, SlotKind(run.kind), begin, end)

    def _rows(self) -> dict[int, list[tuple[str, str]]]:
        """Return the cells of every slot that was used: a character and a style."""
        empty = (" ", "")
        rows = {
            slot: [
                (CELLS[cell.kind], COLOURS[cell.request % len(COLOURS)]) if cell else empty for cell in cells
            ]
            for slot, cells in slot_cells(self._bars(), self._num_columns).items()
        }
        for column, others in enumerate(map(int, self._highest("others"))):
            free = (
                slot for slot in range(self._window.slots) if slot not in rows or rows[slot][column] == empty
            )
            for slot in islice(free, others):
                rows.setdefault(slot, [empty] * self._num_columns)[column] = OTHERS
        return rows

    def _summary(self) -> Text:
        window, steps = self._window, self._window.steps
        text = Text(f"replica {window.replica}", style="bold", no_wrap=True, overflow="ellipsis")
        if not steps:
            return text.append("  idle", style="dim")
        latest, output = steps[-1], sum(step.output for step in steps)
        used, cached = (100 * number / max(1, window.blocks) for number in (latest.used, latest.cached))
        text.append(
            f"  running {latest.running}/{window.slots}  waiting {latest.waiting}  "
            f"{output / window.seconds:,.0f} tokens/s  KV {used:.0f}% used, {cached:.0f}% cached",
            style="not bold",
        )
        drafted = [run.num_drafted() for run in window.runs if run.counts]
        if num_drafted := sum(map(sum, drafted)):
            share = sum(accepted for accepted, _ in drafted) / num_drafted
            text.append(f"  drafts {share:.0%} accepted", style="not bold")
        if window.failed:
            text.append(f"  {len(window.failed)} failed steps", style="bold red")
        return text

    def _step_times(self) -> Text:
        steps = self._window.steps
        if not steps:
            return Text("")
        sums = [sum(column) for column in zip(*(step.parts for step in steps), strict=True)]
        total = max(1, sum(sums))
        slowest = max(steps, key=lambda step: sum(step.parts))
        parts = ", ".join(
            f"{name} {part / total:.0%}"
            for name, part in zip(("schedule", "launch", "device", "update"), sums, strict=True)
        )
        batch = sum(step.tokens for step in steps) / len(steps)
        return Text(
            f"step {total / len(steps) / 1000:.1f} ms ({parts})  slowest {sum(slowest.parts) / 1000:.0f} ms "
            f"(step {slowest.number}, {slowest.tokens} tokens)  {batch:.0f} of {self._window.budget} tokens a step",
            style="dim",
            no_wrap=True,
            overflow="ellipsis",
        )

    def _per_column(self, name: str) -> list[float]:
        values = [0.0] * self._num_columns
        for step in self._window.steps:
            values[self._column(step.end)] += getattr(step, name)
        return [value * self._num_columns / self._window.seconds for value in values]

    def _highest(self, name: str) -> list[float]:
        values = [0.0] * self._num_columns
        for step in self._window.steps:
            column = self._column(step.end)
            values[column] = max(values[column], getattr(step, name))
        return values

    def _sparkline(self, label: str, values: Sequence[float]) -> Text:
        highest = max(values, default=0.0) or 1.0
        cells = ((SPARKS[min(8, round(8 * value / highest))], "dim") for value in values)
        return _line(label, cells)


def _line(label: str, cells: Iterable[tuple[str, str]]) -> Text:
    text = Text(f"{label:<{LABEL_WIDTH}}", style="dim", no_wrap=True, end="")
    pending, style = "", ""
    for character, character_style in cells:
        if character_style != style:
            text.append(pending, style=f"not dim {style}" if style else "")
            pending, style = "", character_style
        pending += character
    text.append(pending, style=f"not dim {style}" if style else "")
    return Text("").append_text(text)
