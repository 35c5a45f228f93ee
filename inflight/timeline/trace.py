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
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from inflight.timeline.chunk_builder import RecordedTimes
from inflight.timeline.chunks import (
    SlotKind,
    SlotRun,
    TimelinePage,
    TimelineQuery,
    chunk_json,
    decode_chunk,
)
from inflight.web import recording_document

VERSION = 1
HOST, DEVICE, FIRST_SLOT = 1, 2, 10  # numbers of tracks
RATE_SECONDS = 0.1  # over which tokens per second are averaged
_KINDS = {SlotKind.DECODE: "decode", SlotKind.PREFILL: "prefill", SlotKind.HELD: "held"}


def recording_of(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return chunks as one JSON object, for files and for pages that show them."""
    return {"object": "recording", "version": VERSION, "created": time.time(), "chunks": list(chunks)}


def read_recording(read: Callable[[TimelineQuery], TimelinePage], to_unix: float) -> dict[str, Any]:
    """Return everything that was recorded, with all that is known of requests."""
    query, chunks, known = TimelineQuery(-math.inf), list[dict[str, Any]](), set[int]()
    while True:
        page = read(query)
        for replica, data in page.chunks:
            chunks.append(chunk_json(decode_chunk(data), replica, to_unix, lambda _: True, known))
        if not page.positions:
            return recording_of(chunks)
        query = TimelineQuery(-math.inf, page.positions)


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
    replicas = sorted({chunk["replica"] for chunk in recording["chunks"]})
    events: list[dict[str, Any]] = []
    for index, replica in enumerate(replicas, 1):
        chunks = [chunk for chunk in recording["chunks"] if chunk["replica"] == replica]
        events += ReplicaTrace(index, replica, chunks).events()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"recorder": "inflight"}}


def joined(runs: Iterable[Sequence[int]]) -> list[SlotRun]:
    """Return runs in order, with those joined that chunks had cut."""
    result: list[SlotRun] = []
    latest: dict[int, int] = {}  # the last run of each slot, as an index of `result`
    for run in sorted((SlotRun(*values) for values in runs), key=lambda run: (run.first_step, run.slot)):
        index = latest.get(run.slot)
        if index is not None and _continues(result[index], run):
            before = result[index]
            result[index] = before._replace(
                num_steps=before.num_steps + run.num_steps, outputs=before.outputs + run.outputs
            )
        else:
            latest[run.slot] = len(result)
            result.append(run)
    return result


def _continues(run: SlotRun, later: SlotRun) -> bool:
    end_step, end_token = (
        run.first_step + run.num_steps,
        run.first_token + run.num_steps * run.tokens_per_step,
    )
    is_same = (run.request, run.kind, run.tokens_per_step) == (
        later.request,
        later.kind,
        later.tokens_per_step,
    )
    expected = run.num_steps if run.kind == SlotKind.DECODE else 0
    return (
        is_same and (end_step, end_token) == (later.first_step, later.first_token) and run.outputs == expected
    )


def first_output(run: SlotRun) -> int:
    """Return the index, within the request, of the first token that a run returned."""
    if run.kind == SlotKind.DECODE:
        return run.first_token + 1
    return run.first_token + run.num_steps * run.tokens_per_step


def _without_overlaps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return slices in order, shortened where they begin before the previous one of their track has ended.

    Times are rounded to microseconds, and steps that failed together were on the device at the same time.
    """
    ends: dict[int, float] = {}
    events.sort(key=lambda event: (event["ts"], event.get("dur", 0.0)))
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            event["ts"] = round(max(event["ts"], ends.get(event["tid"], 0.0)), 3)
            event["dur"] = round(max(0.0, end - event["ts"]), 3)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return events


class ReplicaTrace:
    """The events of one replica."""

    def __init__(self, pid: int, replica: str, chunks: Sequence[dict[str, Any]]) -> None:
        self._pid = pid
        self._replica = replica
        self._chunks = chunks
        self._requests = {item["number"]: item for chunk in chunks for item in chunk["requests"]}
        self._steps: dict[int, RecordedTimes] = {}  # by number, in microseconds
        self._columns: dict[int, dict[str, int]] = {}
        for chunk in chunks:
            self._read_steps(chunk["steps"])

    def _read_steps(self, steps: dict[str, list[Any]]) -> None:
        for index, number in enumerate(steps["step"]):
            times = [steps["at"][index] * 1e6]
            for name in ("schedule", "launch", "device", "update"):
                times.append(times[-1] + steps[name][index])
            self._steps[number] = RecordedTimes(*times)
            self._columns[number] = {name: column[index] for name, column in steps.items()}

    def events(self) -> Iterator[dict[str, Any]]:
        yield self._name("process_name", f"replica {self._replica}")
        yield self._name("thread_name", "host", HOST)
        yield self._name("thread_name", "device", DEVICE)
        runs = joined(run for chunk in self._chunks for run in chunk["runs"])
        for slot in sorted({run.slot for run in runs}):
            yield self._name("thread_name", f"slot {slot}", FIRST_SLOT + slot)
        yield from _without_overlaps([*self._step_events(), *self._slot_events(runs)])
        yield from self._request_events()
        yield from self._counters()

    def _name(self, what: str, name: str, track: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": {"name": name}}

    def _slice(
        self, track: int, name: str, category: str, begin: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        duration = round(max(0.0, end - begin), 3)
        where = {"pid": self._pid, "tid": track, "ts": round(begin, 3), "dur": duration}
        return {"ph": "X", "name": name, "cat": category, **where, "args": args}

    def _step_events(self) -> Iterator[dict[str, Any]]:
        failed = {
            int(number): text for chunk in self._chunks for number, text in chunk.get("failed", {}).items()
        }
        for number, times in self._steps.items():
            columns = {name: value for name, value in self._columns[number].items() if name != "at"}
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

    def _label(self, number: int) -> str:
        return str(self._requests.get(number, {}).get("id", f"request {number}"))

    def _slot_events(self, runs: Sequence[SlotRun]) -> Iterator[dict[str, Any]]:
        for run in runs:
            last_step = run.first_step + run.num_steps - 1
            if run.first_step not in self._steps or last_step not in self._steps:
                continue
            begin, end = self._steps[run.first_step].device_began_at, self._steps[last_step].finished_at
            args: dict[str, Any] = {"request": run.request, **run._asdict()}
            info = self._requests.get(run.request, {})
            if "prompt_tokens" in info:
                args["first_output"] = first_output(run) - info["prompt_tokens"]
            kind = _KINDS[SlotKind(run.kind)]
            name = f"{kind} {self._label(run.request)}"
            yield self._slice(FIRST_SLOT + run.slot, name, kind, begin, end, args)

    def _request_events(self) -> Iterator[dict[str, Any]]:
        phases: dict[int, str] = {}  # open phase of each request
        last_at = max((times.updated_at for times in self._steps.values()), default=0.0)
        events = sorted((event for chunk in self._chunks for event in chunk["events"]), key=lambda e: e["at"])
        for number, info in self._requests.items():
            yield self._span("b", number, self._label(number), info["arrived"] * 1e6, info)
            yield self._span("b", number, "queued", info["arrived"] * 1e6)
            phases[number] = "queued"
        for event in events:
            number, at = event["request"], event["at"] * 1e6
            last_at = max(last_at, at)
            if event["type"] == "arrive" or number not in phases:
                continue
            yield self._span("e", number, phases.pop(number), at)
            if event["type"] in ("finish", "abort"):
                yield self._span("e", number, self._label(number), at, event)
            else:
                phases[number] = "running" if event["type"] == "admit" else "preempted"
                yield self._span("b", number, phases[number], at, event)
        for number, phase in phases.items():  # they have not ended
            yield self._span("e", number, phase, last_at)
            yield self._span("e", number, self._label(number), last_at)

    def _span(
        self, kind: str, number: int, name: str, at: float, args: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        where = {"pid": self._pid, "tid": HOST, "ts": round(at, 3), "id": f"{self._replica}:{number}"}
        return {"ph": kind, "name": name, "cat": "request", **where, "args": args or {}}

    def _counters(self) -> Iterator[dict[str, Any]]:
        numbers = sorted(self._steps)
        finished = [self._steps[number].finished_at for number in numbers]
        outputs = [self._columns[number]["output"] for number in numbers]
        total, sums = 0, [0]
        for output in outputs:
            total += output
            sums.append(total)
        for index, number in enumerate(numbers):
            columns, at = self._columns[number], round(finished[index], 3)
            first = bisect_left(finished, finished[index] - RATE_SECONDS * 1e6)
            rate = (sums[index + 1] - sums[first]) / RATE_SECONDS
            where = {"ph": "C", "pid": self._pid, "tid": 0, "ts": at}
            yield {"name": "KV blocks", **where, "args": {name: columns[name] for name in ("used", "cached")}}
            yield {"name": "queue", **where, "args": {"waiting": columns["waiting"]}}
            yield {"name": "running", **where, "args": {"running": columns["running"]}}
            yield {"name": "tokens/s", **where, "args": {"tokens/s": round(rate, 1)}}
