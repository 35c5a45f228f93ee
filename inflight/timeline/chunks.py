"""Chunks: consecutive steps of one engine, as compact data that is complete in itself.

A chunk has a column of numbers for each property of its steps, and runs:

    slot 0   |P|A A A A A|P|E E E|        each of |...| is a run: the steps in which a slot did
    slot 1   |P P P|B B B|   |C C|        the same for the same request, clipped to the chunk

A `ChunkBuilder` collects it. It is encoded once, in the engine, and stays bytes until someone looks at it. Times are
seconds of the engine's clock.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from inflight.events import ExpertUsage
from inflight.request import RequestOrigin

if TYPE_CHECKING:
    from inflight.timeline.open_runs import OpenRun

# The columns of 32-bit numbers, in order. The first four are microseconds.
COLUMNS = (
    "schedule",
    "launch",
    "device",
    "update",
    "tokens",
    "output",
    "running",
    "waiting",
    "used",
    "cached",
    "filled",  # the tokens in used blocks; it is not sent to viewers
)
MAX_KNOWN = 1 << 14  # requests whose description a reader is known to have
ENDS = ("finish", "abort")  # the last events of a request
RUN_LENGTH = 8  # numbers in a run, without its counts


class SlotKind(enum.IntEnum):
    """The work of a slot in the steps of a run."""

    DECODE = 0
    PREFILL = 1
    HELD = 2  # it belongs to a request that has all its tokens
    # Positions after the end of a text, computed for nothing: only pictures of comparisons show it.
    PADDING = 3


class SlotRun(NamedTuple):
    """Consecutive steps in which a slot did the same for one request.

    A prefill that returns the request's next token ends its run. In a run of decodes every step returns a token, or
    several if tokens were drafted and accepted. For each of the first steps, `counts` has two numbers: the tokens that
    it returned, and the drafted ones that were refused. Every later step returned one and refused none. `outputs` is
    the sum of what was returned, or 0 in a step that failed.
    """

    slot: int
    request: int  # the request's number
    kind: int
    first_step: int
    num_steps: int
    tokens_per_step: int
    first_token: int  # index, within the request, of the first token computed; of the last one in a decode
    outputs: int
    counts: Sequence[int] = ()

    def token_at(self, step: int) -> int:
        """Return the index of the token that the run has reached in `step`, which may be the step after its last."""
        num_steps = step - self.first_step
        returned = self.counts[: 2 * num_steps : 2]
        return self.first_token + sum(returned) + (num_steps - len(returned)) * self.tokens_per_step

    def counts_at(self, step: int) -> tuple[int, int]:
        """Return the tokens that a step of decodes returned, and the drafted ones that were refused."""
        index = 2 * (step - self.first_step)
        if index < len(self.counts):
            return self.counts[index], self.counts[index + 1]
        return min(1, self.outputs), 0

    def num_drafted(self) -> tuple[int, int]:
        """Return how many drafted tokens were accepted and how many refused."""
        counts = self.counts
        return sum(counts[::2]) - len(counts) // 2, sum(counts[1::2])

    def after(self, step: int) -> SlotRun | None:
        """Return the part of the run from `step` on, or None if there is none."""
        skipped = step - self.first_step
        if skipped <= 0:
            return self
        if skipped >= self.num_steps:
            return None
        first_token = self.token_at(step)
        is_decode = self.kind == SlotKind.DECODE
        return self._replace(
            first_step=step,
            num_steps=self.num_steps - skipped,
            first_token=first_token,
            outputs=self.outputs - (first_token - self.first_token) if is_decode else self.outputs,
            counts=self.counts[2 * skipped :],
        )


class RecordedRequest(NamedTuple):
    """A request of the timeline. Its number is never used again on its replica."""

    number: int
    request_id: str  # as the engine knows it
    prompt_tokens: int
    priority: int
    arrived: float
    origin: RequestOrigin | None = None


class TimelineEvent(NamedTuple):
    """Something that happened to a request: it arrived, was admitted or preempted, finished, or was aborted."""

    type: str
    at: float
    request: int  # the request's number
    step: int = -1  # -1: between steps
    slot: int = -1
    cached: int = 0  # tokens found in the prefix cache
    reason: str = ""


class RecordedTimes(NamedTuple):
    """The times of a step."""

    scheduled_at: float  # when scheduling began
    launched_at: float
    device_began_at: float  # after the launch and the end of the previous step
    finished_at: float  # when its results were available
    updated_at: float  # when they had been processed


class Chunk(NamedTuple):
    """Steps [first_step, first_step + len(at)) of an engine, and the events since the chunk before."""

    slots: int  # max_num_seqs
    budget: int  # max_num_batched_tokens
    blocks: int
    block_size: int
    first_step: int
    at: bytes  # float64: when each step was scheduled
    columns: bytes  # uint32: each of COLUMNS
    run_data: bytes  # int64: RUN_LENGTH for each run
    run_counts: dict[int, bytes]  # uint16: the counts of runs that have some, by the index of the run
    failed: dict[int, str]  # messages of failed steps
    requests: list[RecordedRequest]
    events: list[TimelineEvent]
    first_event: int  # number of events before this chunk
    skipped: int = 0  # steps before this chunk that were left out
    # Tokens that the experts of the model received since the previous reading, by the step of the reading: about once a
    # second. It is not sent to viewers.
    experts: Mapping[int, ExpertUsage] = MappingProxyType({})

    @property
    def num_steps(self) -> int:
        return len(self.at) // 8

    @property
    def end_step(self) -> int:
        """The number of the step after the last one."""
        return self.first_step + self.num_steps

    @property
    def end_event(self) -> int:
        return self.first_event + len(self.events)

    @property
    def times(self) -> array[float]:
        return array("d", self.at)

    def column(self, name: str) -> array[int]:
        width = 4 * self.num_steps
        begin = COLUMNS.index(name) * width
        return array("I", self.columns[begin : begin + width])

    def runs(self) -> Iterator[SlotRun]:
        numbers = iter(array("q", self.run_data))
        rows = zip(*[numbers] * RUN_LENGTH, strict=True)
        counts = self.run_counts
        return (
            SlotRun._make((*row, array("H", counts[index]) if index in counts else ()))
            for index, row in enumerate(rows)
        )

    def after(self, step: int, event: int) -> Chunk:
        """Return the part from a step and an event on; each may be beyond the chunk or before it."""
        num_cut = min(max(0, step - self.first_step), self.num_steps)
        num_events = min(max(0, event - self.first_event), len(self.events))
        if not num_cut and not num_events:
            return self
        first_step = self.first_step + num_cut
        parts = (self.column(name)[num_cut:].tobytes() for name in COLUMNS)
        runs = [run for run in (run.after(first_step) for run in self.runs()) if run is not None]
        packed = PackedRuns(runs)
        gone = {event.request for event in self.events[:num_events] if event.type in ENDS}
        gone -= {run.request for run in runs}
        return self._replace(
            first_step=first_step,
            at=self.at[8 * num_cut :],
            columns=b"".join(parts),
            run_data=packed.data,
            run_counts=packed.counts,
            failed={number: text for number, text in self.failed.items() if number >= first_step},
            requests=[info for info in self.requests if info.number not in gone],
            events=self.events[num_events:],
            first_event=self.first_event + num_events,
            experts={number: usage for number, usage in self.experts.items() if number >= first_step},
        )


class PackedRuns:
    """The runs of a chunk as compact data."""

    def __init__(self, runs: Iterable[SlotRun] = ()) -> None:
        self._numbers = array("q")
        self.counts: dict[int, bytes] = {}  # as in `Chunk.run_counts`
        for *numbers, counts in runs:
            self.append(numbers, counts)

    def __len__(self) -> int:
        return len(self._numbers) // RUN_LENGTH

    def append(self, numbers: Sequence[int], counts: Sequence[int]) -> None:
        """Add a run: its numbers, and its counts."""
        if counts:
            self.counts[len(self)] = array("H", counts).tobytes()
        self._numbers.extend(numbers)

    def copy(self) -> PackedRuns:
        copy = PackedRuns()
        copy._numbers, copy.counts = self._numbers[:], self.counts.copy()
        return copy

    @property
    def data(self) -> bytes:
        return self._numbers.tobytes()


class TimelineQuery(NamedTuple):
    """Asks for the chunks that end after `since`. `positions` is that of the page before; None asks for the first."""

    since: float
    positions: dict[str, int] | None = None  # by replica
    replica: str | None = None  # None: all


class TimelinePage(NamedTuple):
    """Encoded chunks, each with its replica. There are more as long as `positions` is not empty."""

    chunks: list[tuple[str, bytes]]
    positions: dict[str, int]


def encode_chunk(chunk: Chunk) -> bytes:
    return _codec()[0](chunk)


def decode_chunk(data: bytes) -> Chunk:
    return _codec()[1](data)


@cache
def _codec() -> tuple[Callable[[Chunk], bytes], Callable[[bytes], Chunk]]:
    """Return functions that encode and decode. Engines that record nothing do without msgspec."""
    import msgspec

    return msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Chunk).decode


def remember(known: set[int], numbers: Iterable[int], events: Iterable[TimelineEvent]) -> None:
    """Add requests that a reader has been sent, and forget ended and very old ones."""
    known.update(numbers)
    known.difference_update(event.request for event in events if event.type in ENDS)
    forget_old(known)


def forget_old(numbers: set[int]) -> None:
    """Keep only the latest of too many requests."""
    if len(numbers) > MAX_KNOWN:
        latest = sorted(numbers)[-MAX_KNOWN // 2 :]
        numbers.clear()
        numbers.update(latest)


# ---- building ----

MAX_KEPT = 4096  # descriptions of requests, of steps that were dropped
LARGEST = 2**32 - 1  # in a column
# The times of a step, and the columns from "tokens" on.
StepRow = tuple[RecordedTimes, int, int, int, int, int, int, int]


class ChunkLimits(NamedTuple):
    """A chunk is closed when it has this many of something, so that converting it takes little time."""

    steps: int
    events: int
    runs: int


class ChunkBuilder:
    """Collects steps, runs and events. With `known`, requests in it are not described again."""

    def __init__(self, sizes: tuple[int, int, int, int], known: set[int] | None = None) -> None:
        self._sizes = sizes
        self._known = known
        self._num_events = 0
        self.skipped = 0
        self.reset(0)

    def reset(self, first_step: int) -> None:
        """Begin a new chunk."""
        self.first_step = first_step
        self.steps: list[StepRow] = []
        self.runs = PackedRuns()
        self.failed: dict[int, str] = {}
        self.events: list[TimelineEvent] = []
        self.requests: dict[int, RecordedRequest] = {}  # of runs and events, by number
        self.experts: dict[int, ExpertUsage] = {}

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.events

    def is_full(self, limits: ChunkLimits) -> bool:
        return (
            len(self.steps) >= limits.steps
            or len(self.events) >= limits.events
            or len(self.runs) >= limits.runs
        )

    def add_events(self, events: Iterable[TimelineEvent], infos: Iterable[RecordedRequest]) -> None:
        self.events += events
        for info in infos:
            self.requests[info.number] = info

    def add_run(self, run: OpenRun, end_step: int, outputs: int | None = None) -> None:
        self._add_run(self.runs, self.requests, run, end_step, outputs)

    def _add_run(
        self,
        runs: PackedRuns,
        requests: dict[int, RecordedRequest],
        run: OpenRun,
        end_step: int,
        outputs: int | None,
    ) -> None:
        numbers: Sequence[int] = run.numbers(end_step, outputs)
        counts: Sequence[int] = run.counts
        if run.first_step < self.first_step:
            part = SlotRun._make((*numbers, counts)).after(self.first_step)
            if part is None:
                return
            *numbers, counts = part
        runs.append(numbers, counts)
        requests[run.info.number] = run.info

    def encode(self, open_runs: Iterable[OpenRun], more: Iterable[RecordedRequest] = ()) -> bytes:
        """Return what is here so far, with the runs that are still open and more descriptions."""
        runs, requests = self.runs.copy(), self.requests.copy()
        end_step = self.first_step + len(self.steps)
        for run in open_runs:
            self._add_run(runs, requests, run, end_step, None)
        requests |= {info.number: info for info in more}
        if self._known is not None:
            requests = {number: info for number, info in requests.items() if number not in self._known}
        chunk = Chunk(
            *self._sizes,
            first_step=self.first_step,
            at=array("d", [row[0].scheduled_at for row in self.steps]).tobytes(),
            columns=_columns(self.steps),
            run_data=runs.data,
            run_counts=runs.counts,
            failed=self.failed,
            requests=list(requests.values()),
            events=self.events,
            first_event=self._num_events,
            skipped=self.skipped,
            experts=self.experts,
        )
        return encode_chunk(chunk)

    def close(self, open_runs: Iterable[OpenRun]) -> bytes:
        """Return the chunk, and begin the next one."""
        open_runs = list(open_runs)
        data = self.encode(open_runs)
        if self._known is not None:
            sent = [*self.requests, *(run.info.number for run in open_runs)]
            remember(self._known, sent, self.events)
        self._begin_next()
        self.skipped = 0
        return data

    def drop(self) -> None:
        """Forget the steps of the chunk, which no one takes. The next chunk says how many there were."""
        self.skipped += len(self.steps)
        requests = self.requests
        self._begin_next()
        self.requests = requests if len(requests) < MAX_KEPT else {}

    def _begin_next(self) -> None:
        self._num_events += len(self.events)
        self.reset(self.first_step + len(self.steps))

    def start_at(self, step: int, num_events: int) -> None:
        """Begin with this step and event."""
        self._num_events = num_events
        self.reset(step)


def _columns(steps: Sequence[StepRow]) -> bytes:
    """Return the numbers of steps column by column, in the order of COLUMNS."""
    if not steps:
        return b""
    times, *counts = zip(*steps, strict=True)
    durations = (
        [int((end - begin) * 1e6) for begin, end in zip(begins, ends, strict=True)]
        for begins, ends in pairwise(zip(*times, strict=True))
    )
    return b"".join(_column(values) for values in (*durations, *counts))


def _column(values: Sequence[int]) -> bytes:
    try:
        return array("I", values).tobytes()
    except OverflowError:
        return array("I", [min(max(0, value), LARGEST) for value in values]).tobytes()
