"""The steps of a recording one by one, for programs that measure an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from inflight.events import ExpertUsage
from inflight.timeline.chunks import (
    Chunk,
    RecordedRequest,
    RecordedTimes,
    SlotKind,
    SlotRun,
    TimelineEvent,
    TimelinePage,
    TimelineQuery,
    decode_chunk,
)


@dataclass(frozen=True, slots=True)
class RecordedSlot:
    """The work of one slot in one step: tokens [start, start + num_tokens) of a request."""

    slot: int
    request: RecordedRequest
    kind: SlotKind
    start: int
    num_tokens: int
    num_outputs: int  # tokens that the answer got
    num_refused: int = 0  # drafted tokens that it did not get

    @property
    def decodes(self) -> bool:
        """Whether the token computed was itself an output; also if what it returned was dropped."""
        return self.num_tokens == 1 and self.start >= self.request.prompt_tokens


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of an engine. Times are seconds of the engine's clock."""

    replica: str
    number: int
    times: RecordedTimes
    num_tokens: int  # computed
    num_outputs: int  # returned to requests
    num_running: int
    num_waiting: int
    num_blocks_used: int
    kv_waste: float  # share of the capacity of used KV blocks that holds no token
    slots: list[RecordedSlot]  # by slot
    events: list[TimelineEvent]
    error: str | None = None  # the step failed, or was in flight with one that did
    # What they received since the last reading, in the steps that were read.
    experts: ExpertUsage | None = None

    def all_decode(self, batch: int) -> bool:
        """Return whether `batch` requests decode, and nothing else is computed."""
        computed = [slot for slot in self.slots if slot.num_tokens]
        return len(computed) == batch and all(slot.decodes for slot in computed)


def read_chunks(
    read: Callable[[TimelineQuery], TimelinePage], query: TimelineQuery
) -> Iterator[tuple[str, bytes]]:
    """Yield the replicas and chunks of all pages."""
    while True:
        page = read(query)
        yield from page.chunks
        if not page.positions:
            return
        query = query._replace(positions=page.positions)


def recorded_steps(chunks: Iterable[tuple[str, bytes]], since: float = 0.0) -> Iterator[RecordedStep]:
    """Yield the steps of encoded chunks that were scheduled since a moment."""
    experts: dict[int, ExpertUsage] = {}
    for replica, data in chunks:
        chunk = decode_chunk(data)
        experts |= chunk.experts
        for step in _steps(replica, chunk, experts):
            if step.times.scheduled_at >= since:
                yield step


def _steps(replica: str, chunk: Chunk, experts: dict[int, ExpertUsage]) -> Iterator[RecordedStep]:
    infos = {info.number: info for info in chunk.requests}
    slots: list[list[RecordedSlot]] = [[] for _ in range(chunk.num_steps)]
    for run in chunk.runs():
        for step in range(run.first_step, run.first_step + run.num_steps):
            slots[step - chunk.first_step].append(_slot(run, step, infos[run.request]))
    durations = zip(*map(chunk.column, ("schedule", "launch", "device", "update")), strict=True)
    names = ("tokens", "output", "running", "waiting", "used", "filled")
    rows = zip(chunk.times, durations, *map(chunk.column, names), strict=True)
    for index, (began_at, parts, tokens, output, running, waiting, used, filled) in enumerate(rows):
        number, capacity = chunk.first_step + index, used * chunk.block_size
        yield RecordedStep(
            replica,
            number,
            RecordedTimes(*accumulate((part / 1e6 for part in parts), initial=began_at)),
            tokens,
            output,
            running,
            waiting,
            used,
            1 - filled / capacity if capacity else 0.0,
            sorted(slots[index], key=lambda slot: slot.slot),
            [event for event in chunk.events if event.step == number],
            chunk.failed.get(number),
            experts.pop(number, None),
        )


def _slot(run: SlotRun, step: int, info: RecordedRequest) -> RecordedSlot:
    slot_kind, is_last = SlotKind(run.kind), step == run.first_step + run.num_steps - 1
    if slot_kind is SlotKind.DECODE:
        outputs, refused = run.counts_at(step)
    else:
        outputs, refused = run.outputs if is_last else 0, 0
    return RecordedSlot(run.slot, info, slot_kind, run.token_at(step), run.tokens_per_step, outputs, refused)
