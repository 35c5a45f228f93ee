"""A recording as a Chrome trace, which Perfetto's UI (ui.perfetto.dev) and chrome://tracing open.

A recording is what `GET /v1/steps` sends: a list of chunks as JSON. In the trace, each replica is a process with these
tracks: what the host did, what the device did, and one for each slot with a slice for each run. Requests are
asynchronous spans from their arrival to their end; KV memory, queue and tokens per second are counters.
"""

from __future__ import annotations

import gzip
import json
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from inflight.timeline.chunk_json import chunk_json
from inflight.timeline.chunks import (
    ENDS,
    RecordedTimes,
    SlotKind,
    SlotRun,
    TimelinePage,
    TimelineQuery,
    decode_chunk,
)
from inflight.timeline.steps import read_chunks
from inflight.web import recording_document

VERSION = 1
HOST, DEVICE, FIRST_SLOT = 1, 2, 10  # numbers of tracks
RATE_SECONDS = 0.1  # over which tokens per second are averaged
MAX_ENDED = 1024  # requests whose ids are kept after their end: later steps of theirs may have been in flight
GZIP = 31  # tells zlib to write a gzip header
_TRACE = {"displayTimeUnit": "ms", "otherData": {"recorder": "inflight"}}
_KINDS = {SlotKind.DECODE: "decode", SlotKind.PREFILL: "prefill", SlotKind.HELD: "held"}


def recording_of(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return chunks as one JSON object, for files and for pages that show them."""
    return _recording() | {"chunks": list(chunks)}


def _recording() -> dict[str, Any]:
    return {"object": "recording", "version": VERSION, "created": time.time()}


def read_recording(read: Callable[[TimelineQuery], TimelinePage], to_unix: float) -> dict[str, Any]:
    """Return everything that was recorded, with all that is known of requests."""
    known = set[int]()
    return recording_of(
        [
            chunk_json(decode_chunk(data), replica, to_unix, known)
            for replica, data in read_chunks(read, TimelineQuery(-math.inf))
        ]
    )


def write_recording(recording: dict[str, Any], path: str | PathLike[str]) -> None:
    """Write the trace of a recording to a file; one that ends with .gz is compressed. A file that ends with .html
    becomes a page that shows the timeline itself, without a server."""
    path = Path(path)
    if path.suffix == ".html":
        path.write_text(recording_document(recording["chunks"]), encoding="utf-8")
        return
    data = json.dumps(trace_of(recording)).encode()
    path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)


def trace_of(recording: dict[str, Any]) -> dict[str, Any]:
    """Return the trace of a recording."""
    trace, events = Trace(), list[dict[str, Any]]()
    for chunk in recording["chunks"]:
        events += trace.add(chunk)
    return {"traceEvents": events + trace.end(), **_TRACE}


class FileWriter:
    """Writes a trace or a recording piece by piece, compressed with gzip. It holds little more than a chunk."""

    def __init__(self, as_trace: bool) -> None:
        self._trace = Trace() if as_trace else None
        fields, items = (_TRACE, "traceEvents") if as_trace else (_recording(), "chunks")
        self._separator = f'{json.dumps(fields)[:-1]}, "{items}": ['.encode()
        self._gzip = zlib.compressobj(5, wbits=GZIP)

    def add(self, chunk: bytes) -> bytes:
        """Return the next bytes of the file, which may be none. `chunk` is a chunk as JSON."""
        import msgspec

        if self._trace is None:
            return self._write(chunk)
        return self._write(msgspec.json.encode(self._trace.add(msgspec.json.decode(chunk)))[1:-1])

    def end(self) -> bytes:
        """Return the last bytes of the file."""
        ending = b"" if self._trace is None else self._write(json.dumps(self._trace.end()).encode()[1:-1])
        begin = b"" if self._separator == b"," else self._separator
        return ending + self._gzip.compress(begin + b"]}") + self._gzip.flush()

    def _write(self, items: bytes) -> bytes:
        if not items:
            return b""
        separator, self._separator = self._separator, b","
        return self._gzip.compress(separator + items)


def _end_step(run: SlotRun) -> int:
    return run.first_step + run.num_steps


def _continues(run: SlotRun, later: SlotRun) -> bool:
    end_step = _end_step(run)
    end_token = run.token_at(end_step)
    is_same = (run.request, run.kind, run.tokens_per_step) == (
        later.request,
        later.kind,
        later.tokens_per_step,
    )
    expected = end_token - run.first_token if run.kind == SlotKind.DECODE else 0
    return (
        is_same and (end_step, end_token) == (later.first_step, later.first_token) and run.outputs == expected
    )


def _joined(run: SlotRun, later: SlotRun) -> SlotRun:
    """Return a run and the one that continues it as one."""
    counts: list[int] = []
    if run.counts or later.counts:
        counts = [*run.counts, *[1, 0] * (run.num_steps - len(run.counts) // 2), *later.counts]
    num_steps, outputs = run.num_steps + later.num_steps, run.outputs + later.outputs
    return run._replace(num_steps=num_steps, outputs=outputs, counts=counts)


def first_output(run: SlotRun) -> int:
    """Return the index, within the request, of the first token that a run returned."""
    return run.first_token + (1 if run.kind == SlotKind.DECODE else run.num_steps * run.tokens_per_step)


class OpenSlice(NamedTuple):
    """The last run of a slot, which the next chunk may continue, with its times in microseconds."""

    run: SlotRun
    begin: float
    end: float


class Trace:
    """Turns chunks into the events of a trace, one after the other."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaTrace] = {}

    def add(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that follow from the next chunk."""
        name = chunk["replica"]
        if name not in self._replicas:
            self._replicas[name] = ReplicaTrace(len(self._replicas) + 1, name)
        return list(self._replicas[name].add(chunk))

    def end(self) -> list[dict[str, Any]]:
        """Return the events of what is still open."""
        return [event for replica in self._replicas.values() for event in replica.end()]


class ReplicaTrace:
    """Makes the events of one replica. It remembers only what the next chunk may continue."""

    def __init__(self, pid: int, replica: str) -> None:
        self._pid = pid
        self._replica = replica
        self._tracks: set[int] = set()  # those that have a name
        self._busy_until: dict[int, float] = {}  # by track
        self._open: dict[int, OpenSlice] = {}  # by slot
        self._requests: dict[int, dict[str, Any]] = {}
        self._ended: deque[int] = deque()  # the requests that have ended, as long as they are known
        self._phases: dict[int, str] = {}  # open phase of each request
        self._outputs: deque[tuple[float, int]] = deque()  # of the last steps: end and tokens
        self._num_outputs = 0  # in `_outputs`
        self._last_at = 0.0

    def add(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events that follow from the next chunk."""
        columns = chunk["steps"]
        steps = dict(_step_times(columns))
        yield from self._name_tracks(chunk)
        yield from self._begin_requests(chunk["requests"])
        slices = [*self._step_events(chunk, steps), *self._slot_events(chunk["runs"], steps)]
        yield from self._without_overlaps(slices)
        for times in steps.values():
            self._last_at = max(self._last_at, times.updated_at)
        for event in sorted(chunk["events"], key=lambda event: event["at"]):
            yield from self._request_event(event)
        for index, times in enumerate(steps.values()):
            yield from self._counters({name: values[index] for name, values in columns.items()}, times)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the events of what is still open."""
        yield from self._without_overlaps([self._slot_slice(item) for item in self._open.values()])
        for number, phase in self._phases.items():
            yield self._span("e", number, phase, self._last_at)
            yield self._span("e", number, self._label(number), self._last_at)

    # ---- tracks ----

    def _name_tracks(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._tracks:
            yield self._name("process_name", f"replica {self._replica}")
        names = {HOST: "host", DEVICE: "device"}
        names |= {FIRST_SLOT + slot: f"slot {slot}" for slot in sorted({run[0] for run in chunk["runs"]})}
        for track, name in names.items():
            if track not in self._tracks:
                self._tracks.add(track)
                yield self._name("thread_name", name, track)

    def _name(self, what: str, name: str, track: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": {"name": name}}

    def _slice(
        self, track: int, name: str, category: str, begin: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        duration = round(max(0.0, end - begin), 3)
        where = {"pid": self._pid, "tid": track, "ts": round(begin, 3), "dur": duration}
        return {"ph": "X", "name": name, "cat": category, **where, "args": args}

    def _without_overlaps(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return slices in order, shortened where they begin before the previous one of their track has ended.

        Times are rounded to microseconds, and steps that failed together were on the device at the same time.
        """
        ends = self._busy_until
        events.sort(key=lambda event: (event["ts"], event.get("dur", 0.0)))
        for event in events:
            if event["ph"] == "X":
                end = event["ts"] + event["dur"]
                event["ts"] = round(max(event["ts"], ends.get(event["tid"], 0.0)), 3)
                event["dur"] = round(max(0.0, end - event["ts"]), 3)
                ends[event["tid"]] = event["ts"] + event["dur"]
        return events

    # ---- steps and slots ----

    def _step_events(
        self, chunk: dict[str, Any], steps: dict[int, RecordedTimes]
    ) -> Iterator[dict[str, Any]]:
        failed = {int(number): text for number, text in chunk.get("failed", {}).items()}
        for index, (number, times) in enumerate(steps.items()):
            columns = {name: values[index] for name, values in chunk["steps"].items() if name != "at"}
            yield self._slice(
                HOST, "schedule", "host", times.scheduled_at, times.launched_at, {"step": number}
            )
            yield self._slice(HOST, "update", "host", times.finished_at, times.updated_at, {"step": number})
            yield self._slice(
                DEVICE, f"step {number}", "device", times.device_began_at, times.finished_at, columns
            )
            if number in failed:
                where = {"pid": self._pid, "tid": DEVICE, "ts": round(times.finished_at, 3)}
                args = {"step": number, "error": failed[number]}
                yield {"ph": "i", "s": "p", "name": "step failed", "cat": "failure", **where, "args": args}

    def _slot_events(
        self, runs: Sequence[Sequence[Any]], steps: dict[int, RecordedTimes]
    ) -> Iterator[dict[str, Any]]:
        """Yield the slices of runs that have ended, joining those that were cut at the ends of chunks."""
        for run in sorted((SlotRun(*values) for values in runs), key=lambda run: (run.first_step, run.slot)):
            first_times, last_times = (steps.get(number) for number in (run.first_step, _end_step(run) - 1))
            if first_times is None or last_times is None:
                continue
            before = self._open.get(run.slot)
            if before is not None and _continues(before.run, run):
                self._open[run.slot] = OpenSlice(
                    _joined(before.run, run), before.begin, last_times.finished_at
                )
            else:
                if before is not None:
                    yield self._slot_slice(before)
                self._open[run.slot] = OpenSlice(run, first_times.device_began_at, last_times.finished_at)
        end_step = max(steps, default=-1) + 1
        for slot, item in list(self._open.items()):
            if _end_step(item.run) < end_step:
                yield self._slot_slice(self._open.pop(slot))

    def _slot_slice(self, item: OpenSlice) -> dict[str, Any]:
        run = item.run
        args: dict[str, Any] = run._asdict()
        if args.pop("counts"):
            args["accepted"], args["refused"] = run.num_drafted()
        info = self._requests.get(run.request, {})
        if "prompt_tokens" in info:
            args["first_output"] = first_output(run) - info["prompt_tokens"]
        activity = _KINDS[SlotKind(run.kind)]
        name = f"{activity} {self._label(run.request)}"
        return self._slice(FIRST_SLOT + run.slot, name, activity, item.begin, item.end, args)

    # ---- requests ----

    def _label(self, number: int) -> str:
        return str(self._requests.get(number, {}).get("id", f"request {number}"))

    def _begin_requests(self, infos: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for info in infos:
            number = info["number"]
            if number not in self._requests:
                self._requests[number] = info
                self._phases[number] = "queued"
                yield self._span("b", number, self._label(number), info["arrived"] * 1e6, info)
                yield self._span("b", number, "queued", info["arrived"] * 1e6)

    def _request_event(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        number, timestamp = event["request"], event["at"] * 1e6
        self._last_at = max(self._last_at, timestamp)
        if event["type"] == "arrive" or number not in self._phases:
            return
        yield self._span("e", number, self._phases.pop(number), timestamp)
        if event["type"] in ENDS:
            yield self._span("e", number, self._label(number), timestamp, event)
            self._ended.append(number)
            if len(self._ended) > MAX_ENDED:
                del self._requests[self._ended.popleft()]
        else:
            self._phases[number] = "running" if event["type"] == "admit" else "preempted"
            yield self._span("b", number, self._phases[number], timestamp, event)

    def _span(
        self, phase: str, number: int, name: str, timestamp: float, args: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        where = {"pid": self._pid, "tid": HOST, "ts": round(timestamp, 3), "id": f"{self._replica}:{number}"}
        return {"ph": phase, "name": name, "cat": "request", **where, "args": args or {}}

    # ---- counters ----

    def _counters(self, columns: dict[str, Any], times: RecordedTimes) -> Iterator[dict[str, Any]]:
        finished, timestamp = times.finished_at, round(times.finished_at, 3)
        self._outputs.append((finished, columns["output"]))
        self._num_outputs += columns["output"]
        while self._outputs[0][0] < finished - RATE_SECONDS * 1e6:
            self._num_outputs -= self._outputs.popleft()[1]
        where = {"ph": "C", "pid": self._pid, "tid": 0, "ts": timestamp}
        yield {"name": "KV blocks", **where, "args": {name: columns[name] for name in ("used", "cached")}}
        yield {"name": "queue", **where, "args": {"waiting": columns["waiting"]}}
        yield {"name": "running", **where, "args": {"running": columns["running"]}}
        yield {"name": "slots of others", **where, "args": {"slots": columns.get("others", 0)}}
        rate = self._num_outputs / RATE_SECONDS
        yield {"name": "tokens/s", **where, "args": {"tokens/s": round(rate, 1)}}


def _step_times(steps: dict[str, list[Any]]) -> Iterator[tuple[int, RecordedTimes]]:
    """Yield the number and the times of each step, in microseconds."""
    for index, number in enumerate(steps["step"]):
        times = [steps["at"][index] * 1e6]
        for name in ("schedule", "launch", "device", "update"):
            times.append(times[-1] + steps[name][index])
        yield number, RecordedTimes(*times)
