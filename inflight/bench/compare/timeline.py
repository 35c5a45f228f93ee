"""The model behind every picture: which request held which slot in which step.

    slot 0   |P A A A A|P E E E|          P  a prompt is computed (prefill)
    slot 1   |P B B . . . . .  |          A  a token is produced (decode)
             step 0 ...                   .  a finished request still holds the slot

Adjacent cells of the same kind and request are merged into one span. `ComparisonView` is what tables, pictures and
pages know about a comparison.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from inflight.bench.compare.arrivals import Arrival
from inflight.timeline.chunks import SlotKind

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from inflight.bench.compare.measure import StrategyRun

F = TypeVar("F", bound="DataclassInstance")
R = TypeVar("R", bound="RequestInfo")

CUT = 1.5  # a strategy that takes this many times as long as all others is not shown to its end


@dataclass(slots=True)
class Span:
    """Steps [first, last) of one request in one slot."""

    slot: int
    request: int  # index in the workload
    kind: SlotKind
    first: int
    last: int
    num_tokens: int  # tokens produced here that the answer keeps
    begin: float = 0.0  # the part of these steps that the span covers, from `begin` to `end`
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One strategy's slots over its steps. Step i lasts from begins[i] to ends[i], in seconds after the start."""

    strategy: str
    num_slots: int
    begins: list[float]
    ends: list[float]
    spans: list[Span]  # ordered by slot, then by step

    @property
    def num_steps(self) -> int:
        return len(self.ends)

    @property
    def duration(self) -> float:
        return self.ends[-1]

    @property
    def num_slots_used(self) -> int:
        return 1 + max(span.slot for span in self.spans)

    def interval(self, span: Span) -> tuple[float, float]:
        """Return when a span begins and ends."""
        low, high = self.begins[span.first], self.ends[span.last - 1]
        return low + span.begin * (high - low), low + span.end * (high - low)

    def num_done(self, moment: float) -> int:
        """Return how many requests had all their tokens at the given moment."""
        num_steps = bisect_right(self.ends, moment)
        last_steps: dict[int, int] = {}
        for span in self.spans:
            if span.num_tokens:
                last_steps[span.request] = max(last_steps.get(span.request, 0), span.last)
        return sum(last_step <= num_steps for last_step in last_steps.values())

    def to_json(self) -> dict[str, Any]:
        """Return what is needed to draw the timeline again.

        That is the end of each step, the steps that began later than the previous one ended, and the spans as
        [slot, request, kind, first step, end, tokens].
        """
        earlier = [0.0, *self.ends]
        return {
            "step_ends": [round(moment, 5) for moment in self.ends],
            "pauses": [
                [step, round(begin, 5)] for step, begin in enumerate(self.begins) if begin > earlier[step]
            ],
            "spans": [
                [span.slot, span.request, span.kind.name.lower(), span.first, span.last, span.num_tokens]
                for span in self.spans
            ],
        }


def lay_out(run: StrategyRun) -> Timeline:
    """Build the timeline of a measured run."""
    index = {request.request_id: number for number, request in enumerate(run.requests)}
    open_spans: dict[int, Span] = {}
    spans: list[Span] = []
    for number, step in enumerate(run.recording.steps):
        for cell in step.slots:
            request = index[cell.request.request_id]
            span = Span(cell.slot, request, cell.kind, number, number + 1, cell.num_outputs)
            _extend(spans, open_spans, span)
    spans.sort(key=lambda span: (span.slot, span.first))
    return Timeline(run.strategy, run.num_slots, run.recording.begins, run.recording.ends, spans)


def _extend(spans: list[Span], open_spans: dict[int, Span], cell: Span) -> None:
    """Add a cell to the span it continues, or start a new span with it."""
    open_span = open_spans.get(cell.slot)
    if open_span is not None and (open_span.request, open_span.kind, open_span.last) == (
        cell.request,
        cell.kind,
        cell.first,
    ):
        open_span.last = cell.last
        open_span.num_tokens += cell.num_tokens
    else:
        open_spans[cell.slot] = cell
        spans.append(cell)


def shown_seconds(timelines: Sequence[Timeline]) -> float:
    """Return how many seconds pictures show: as many as the slowest strategy takes.

    If that strategy is so slow that all others would become slivers, pictures end with the second slowest.
    """
    durations = sorted((timeline.duration for timeline in timelines), reverse=True)
    cut = len(durations) > 1 and durations[0] > CUT * durations[1]
    return durations[1] if cut else durations[0]


def ticks(limit: float, most: int = 12) -> list[float]:
    """Return about `most` round numbers or fewer, from 0 to the limit."""
    rough = limit / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(limit / step + 1e-9) + 1)]


# ---- what renderers need to know ----


class LegendEntry(NamedTuple):
    kind: SlotKind | None  # None: an empty slot
    text: str  # for pages
    short_text: str  # for terminals; "" leaves the entry out


@dataclass(frozen=True, slots=True)
class StrategyResult(Generic[F]):
    """The figures of one strategy, a dataclass, and its timeline."""

    figures: F
    timeline: Timeline
    speedup: float  # throughput of the reference strategy divided by this strategy's
    chunks: list[dict[str, Any]]  # its recording, in the format of `GET /v1/steps`


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The facts about a request that accompany the picture."""

    label: str
    title: str


@dataclass(frozen=True)
class StrategyComparison(ABC, Generic[F, R]):
    """A finished comparison, whatever was compared."""

    model: str
    num_slots: int
    reference: str
    requests: list[R]
    results: dict[str, StrategyResult[F]]  # strategy -> result, in the order of the runs

    legend: ClassVar[tuple[LegendEntry, ...]]
    definitions: ClassVar[tuple[tuple[str, str], ...]]  # the table's terms and their meanings
    throughput: ClassVar[str]  # "produces {} times as many tokens per second as {}"
    padded: ClassVar[tuple[str, ...]] = ()  # strategies that pad every text to the longest one of its step
    # The table's rows: names, and how figures are written.
    table: ClassVar[Sequence[tuple[str, Callable[[Any], str]]]]

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of a page."""

    @property
    @abstractmethod
    def subtitle(self) -> str:
        """The workload in one line."""

    @property
    @abstractmethod
    def verdict(self) -> str:
        """A sentence that says whether all strategies gave the same results."""

    @abstractmethod
    def summary(self, strategy: str) -> str:
        """Return a strategy's most important figures."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        verb, rest = self.throughput.split(" ", 1)
        others = [
            rest.format(f"{result.speedup:.1f}", name)
            for name, result in self.results.items()
            if name != self.reference
        ]
        return f"{self.reference.capitalize()} {verb} {join_words(others)}." if others else ""

    def rows(self) -> list[tuple[str, list[str]]]:
        """Return the table's rows: a name and one cell per strategy. A figure that is unknown for all has none."""
        results = self.results.values()
        rows = [(name, [write(result.figures) for result in results]) for name, write in self.table]
        rows.append((f"{self.reference} is faster by", [f"{result.speedup:.2f} x" for result in results]))
        return [(name, cells) for name, cells in rows if any(cells)]

    def setting(self, things: str, arrival: Arrival) -> str:
        """Return how many things arrived how, and what served them."""
        when = "in one burst" if arrival.rate is None else f"arriving at random, {arrival.rate:g} per second"
        return f"{self.num_requests} {things} {when}, {self.num_slots} slots, {self.model}"

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def timelines(self) -> list[Timeline]:
        """One timeline per strategy, in the order of the runs."""
        return [result.timeline for result in self.results.values()]

    def label(self, request: int) -> str:
        """Return a request's letter."""
        return self.requests[request].label

    def describe_request(self, request: int) -> str:
        """Return a request's letter and what the request is."""
        return f"{self.requests[request].label}: {self.requests[request].title}"

    def results_json(self) -> dict[str, Any]:
        """Return every figure and what is needed to draw the picture again."""
        return {
            "reference": self.reference,
            "strategies": {
                name: {**asdict(result.figures), "speedup_of_reference": result.speedup}
                for name, result in self.results.items()
            },
            "requests": [asdict(request) for request in self.requests],
            "timelines": {name: result.timeline.to_json() for name, result in self.results.items()},
        }


ComparisonView: TypeAlias = StrategyComparison[Any, Any]  # as tables, pictures and pages see it


def results_of(
    figures: Mapping[str, F],
    timelines: Sequence[Timeline],
    recordings: Sequence[list[dict[str, Any]]],
    throughput: Callable[[F], float],
) -> tuple[str, dict[str, StrategyResult[F]]]:
    """Return the reference strategy, and each strategy's result relative to it."""
    reference = "continuous" if "continuous" in figures else list(figures)[-1]
    best = throughput(figures[reference])
    return reference, {
        timeline.strategy: StrategyResult(
            figures[timeline.strategy], timeline, best / throughput(figures[timeline.strategy]), chunks
        )
        for timeline, chunks in zip(timelines, recordings, strict=True)
    }


def request_label(index: int) -> str:
    """Return A to Z, then AA, AB and so on."""
    text = ""
    while index >= 0:
        text = chr(ord("A") + index % 26) + text
        index = index // 26 - 1
    return text


def join_words(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
