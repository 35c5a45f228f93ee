"""Chunks in the form of `GET /v1/steps`, which docs/timeline.md describes."""

from __future__ import annotations

from collections.abc import Container
from itertools import accumulate
from typing import Any

from inflight.request import RequestOrigin
from inflight.timeline.chunks import COLUMNS, Chunk, RecordedRequest, TimelineEvent, remember

FAILED = "the step failed"  # for readers who may not see all requests: a message can be about one of them


def chunk_json(
    chunk: Chunk, replica: str, to_unix: float, known: set[int], visible: Container[int] | None = None
) -> dict[str, Any]:
    """Return a chunk as `GET /v1/steps` sends it.

    `to_unix` is added to all times. `known` holds the numbers of requests that the reader has been sent, without those
    that have ended. `visible` holds the numbers of those that it may see, None means all: about others, the reader
    learns only how many slots they have in each step. What a step computed for everyone is in its columns.
    """
    steps: dict[str, list[Any]] = {"step": list(range(chunk.first_step, chunk.end_step))}
    steps["at"] = [round(moment + to_unix, 6) for moment in chunk.times]
    steps |= {name: chunk.column(name).tolist() for name in COLUMNS[:-1]}
    runs = [
        run._replace(counts=list(run.counts)) if run.counts else run
        for run in chunk.runs()
        if visible is None or run.request in visible
    ]
    steps["others"] = [0] * chunk.num_steps if visible is None else _others(chunk, visible)
    requests = [info for info in chunk.requests if visible is None or info.number in visible]
    events = [event for event in chunk.events if visible is None or event.request in visible]
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
            str(number): text if visible is None else FAILED for number, text in chunk.failed.items()
        }
    if chunk.skipped:
        result["skipped"] = chunk.skipped
    remember(known, (info.number for info in requests), events)
    return result


def _others(chunk: Chunk, visible: Container[int]) -> list[int]:
    """Return, for each step, the number of slots that requests outside `visible` have."""
    changes = [0] * (chunk.num_steps + 1)
    for run in chunk.runs():
        if run.request not in visible:
            begin = run.first_step - chunk.first_step
            changes[begin] += 1
            changes[begin + run.num_steps] -= 1
    return list(accumulate(changes[:-1]))


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
