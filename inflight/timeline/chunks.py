"""Chunks: consecutive steps of one engine, as compact data that is complete in itself.

A chunk has a column of numbers for each property of its steps, and runs:

    slot 0   |P|A A A A A|P|E E E|        each of |...| is a run: the steps in which a slot did
    slot 1   |P P P|B B B|   |C C|        the same for the same request, clipped to the chunk

It is encoded once, in the engine, and stays bytes until someone looks at it. Times are seconds of the engine's clock.
`chunk_json` returns a chunk in the form of `GET /v1/steps`, which docs/timeline.md describes.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

from inflight.events import ExpertUsage
from inflight.request import RequestOrigin

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
MAX_KNOWN = 1 << 14  # requests of which a reader is known to have the description
ENDS = ("finish", "abort")  # the last events of a request
RUN_LENGTH = 8  # numbers in a run, without its counts


class SlotKind(enum.IntEnum):
    """The work of a slot in the steps of a run."""

    DECODE = 0
    PREFILL = 1
    HELD = 2  # it belongs to a request that has all its tokens


class SlotRun(NamedTuple):
    """Consecutive steps in which a slot did the same for one request.

    A prefill that returns the request's next token ends its run. In a run of decodes every step returns a token, or
    several: `counts` has the tokens of each of the first steps, and every later one returned one. `outputs` is their
    sum, or 0 in a step that failed.
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

    def after(self, step: int) -> SlotRun | None:
        """Return the part of the run from `step` on, or None if there is none."""
        skipped = step - self.first_step
        if skipped <= 0:
            return self
        if skipped >= self.num_steps:
            return None
        first_token = token_at(self, step)
        is_decode = self.kind == SlotKind.DECODE
        return self._replace(
            first_step=step,
            num_steps=self.num_steps - skipped,
            first_token=first_token,
            outputs=self.outputs - (first_token - self.first_token) if is_decode else self.outputs,
            counts=self.counts[skipped:],
        )


class TokenRun(Protocol):
    """The fields of a run that its positions depend on."""

    @property
    def first_step(self) -> int: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def first_token(self) -> int: ...
    @property
    def counts(self) -> Sequence[int]: ...


def token_at(run: TokenRun, step: int) -> int:
    """Return the index of the token that a run has reached in `step`, which may be the step after its last one."""
    num_steps, counts = step - run.first_step, run.counts
    if not counts:
        return run.first_token + num_steps * run.tokens_per_step
    return run.first_token + sum(counts[:num_steps]) + max(0, num_steps - len(counts))


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
    run_counts: dict[int, Sequence[int]]  # the counts of runs that have some, by the index of the run
    failed: dict[int, str]  # messages of failed steps
    requests: list[RecordedRequest]
    events: list[TimelineEvent]
    first_event: int  # number of events before this chunk
    skipped: int = 0  # steps before this chunk that were left out
    # What the experts of the model received since the reading before, by the step that it was read in: about once a
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
        return (SlotRun._make((*row, self.run_counts.get(index, ()))) for index, row in enumerate(rows))

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
        self.counts: dict[int, Sequence[int]] = {}  # as in `Chunk.run_counts`
        for run in runs:
            self.append(run)

    def __len__(self) -> int:
        return len(self._numbers) // RUN_LENGTH

    def append(self, run: SlotRun) -> None:
        if run.counts:
            self.counts[len(self)] = run.counts
        self._numbers.extend(cast("tuple[int, ...]", run[:RUN_LENGTH]))

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


# ---- JSON ----

FAILED = "the step failed"  # for readers who may not see all requests: a message can be about one of them


def chunk_json(
    chunk: Chunk, replica: str, to_unix: float, known: set[int], own: Container[int] | None = None
) -> dict[str, Any]:
    """Return a chunk as `GET /v1/steps` sends it.

    `to_unix` is added to all times. `known` holds the numbers of requests that the reader has been sent, without those
    that have ended. `own` holds those that it may see, None means all: of others, the reader learns nothing but how
    many slots they have in each step. What a step computed for everyone is in its columns.
    """
    steps: dict[str, list[Any]] = {"step": list(range(chunk.first_step, chunk.end_step))}
    steps["at"] = [round(at + to_unix, 6) for at in chunk.times]
    steps |= {name: chunk.column(name).tolist() for name in COLUMNS[:-1]}
    runs = [run for run in chunk.runs() if own is None or run.request in own]
    steps["others"] = [0] * chunk.num_steps if own is None else _others(chunk, own)
    requests = [info for info in chunk.requests if own is None or info.number in own]
    events = [event for event in chunk.events if own is None or event.request in own]
    result: dict[str, Any] = {
        "replica": replica,
        "slots": chunk.slots,
        "budget": chunk.budget,
        "kv": {"blocks": chunk.blocks, "block_size": chunk.block_size},
        "steps": steps,
        "runs": runs,
        "requests": [request_json(info, to_unix) for info in requests if info.number not in known],
        "events": [_event_json(event, to_unix) for event in sorted(events, key=lambda event: event.at)],
    }
    if chunk.failed:
        result["failed"] = {
            str(number): text if own is None else FAILED for number, text in chunk.failed.items()
        }
    if chunk.skipped:
        result["skipped"] = chunk.skipped
    remember(known, (info.number for info in requests), events)
    return result


def _others(chunk: Chunk, own: Container[int]) -> list[int]:
    """Return, for each step, the number of slots that requests outside `own` have."""
    changes = [0] * (chunk.num_steps + 1)
    for run in chunk.runs():
        if run.request not in own:
            begin = run.first_step - chunk.first_step
            changes[begin] += 1
            changes[begin + run.num_steps] -= 1
    return list(accumulate(changes[:-1]))


def remember(known: set[int], numbers: Iterable[int], events: Iterable[TimelineEvent]) -> None:
    """Add requests that a reader has been sent, and forget those that have ended or are very old."""
    known.update(numbers)
    known.difference_update(event.request for event in events if event.type in ENDS)
    forget_old(known)


def forget_old(numbers: set[int]) -> None:
    """Keep only the latest of too many requests."""
    if len(numbers) > MAX_KNOWN:
        latest = sorted(numbers)[-MAX_KNOWN // 2 :]
        numbers.clear()
        numbers.update(latest)


def request_json(info: RecordedRequest, to_unix: float) -> dict[str, Any]:
    origin = info.origin or RequestOrigin(info.request_id)
    result: dict[str, Any] = {
        "number": info.number,
        "arrived": round(info.arrived + to_unix, 6),
        "id": origin.request_id,
        "answer": origin.answer,
        "key": origin.key,
        "route": origin.route,
        "prompt_tokens": info.prompt_tokens,
        "priority": info.priority,
    }
    if origin.text:
        result["text"] = origin.text
    return result


def _event_json(event: TimelineEvent, to_unix: float) -> dict[str, Any]:
    result: dict[str, Any] = {"type": event.type, "at": round(event.at + to_unix, 6)}
    if event.step >= 0:
        result["step"] = event.step
    result["request"] = event.request
    if event.type == "admit":
        result |= {"slot": event.slot, "cached": event.cached}
    if event.reason:
        result["reason"] = event.reason
    return result
