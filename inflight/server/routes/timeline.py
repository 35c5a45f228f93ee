"""The timeline of the engines: steps as they happen, memory, and traces to download."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from inflight.engine import MemoryState
from inflight.errors import RequestError, shown
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.http.bodies import ENGINE_RESPONSE
from inflight.server.openapi import documented, query_parameters, respond
from inflight.server.state import ServerState, caller_of, state_of
from inflight.timeline.chunks import RecordedRequest
from inflight.timeline.stream import TimelineStream
from inflight.timeline.trace import recording_of, trace_of

router = APIRouter()

MAX_VIEWERS = 64  # of /v1/steps in one process
POLL = 1.0  # seconds between checks whether the server shuts down
SILENCE = 10.0  # seconds after which a comment is sent
MAX_TRACE_SECONDS = 600.0
NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class RecordedStepColumns(BaseModel):
    """One number for each step. Durations are in microseconds."""

    step: list[int] = Field(description="Numbers of the steps, ascending. Failed steps are among them.")
    at: list[float] = Field(description="When the step was scheduled, in seconds since 1970.")
    schedule: list[int] = Field(description="Time to choose what runs, on the host.")
    launch: list[int] = Field(
        description="From the launch until the device began: it may finish another step first."
    )
    device: list[int] = Field(description="From when the device began until the results were available.")
    update: list[int] = Field(description="Time to process the results, on the host.")
    tokens: list[int] = Field(description="Tokens computed.")
    output: list[int] = Field(description="Tokens returned to requests.")
    running: list[int] = Field(description="Running requests.")
    waiting: list[int] = Field(description="Waiting requests.")
    used: list[int] = Field(description="KV blocks in use.")
    cached: list[int] = Field(description="KV blocks that are not in use, but that prefix hits can find.")


class KVSize(BaseModel):
    blocks: int
    block_size: int = Field(description="Tokens in a block.")


class ShownRequest(BaseModel):
    """A request on the timeline. Those of other keys have only a number and the time of their arrival."""

    number: int = Field(description="Unique on its replica.")
    arrived: float = Field(description="Seconds since 1970.")
    id: str | None = None
    answer: int | None = Field(None, description="Index of the answer, where a request has several.")
    key: str | None = Field(None, description="The name of the API key.")
    route: str | None = None
    prompt_tokens: int | None = None
    priority: int | None = None
    text: str | None = Field(None, description="The prompt, shortened; only with --timeline-text.")


class ShownEvent(BaseModel):
    type: Literal["arrive", "admit", "preempt", "finish", "abort"]
    at: float = Field(description="Seconds since 1970.")
    request: int = Field(description="The number of the request.")
    step: int | None = None
    slot: int | None = Field(None, description="Of an admission.")
    cached: int | None = Field(None, description="Of an admission: tokens found in the prefix cache.")
    reason: str | None = None


class TimelineChunk(BaseModel):
    """Consecutive steps of one engine, and what happened since the chunk before."""

    replica: str
    slots: int = Field(description="The most requests that can run at once (max_num_seqs).")
    budget: int = Field(description="The most tokens of one step (max_num_batched_tokens).")
    kv: KVSize
    steps: RecordedStepColumns
    failed: dict[str, str] | None = Field(None, description="Messages of failed steps, by number.")
    runs: list[list[int]] = Field(
        description="What slots did: [slot, request, kind, first step, steps, tokens per step, first token, outputs]. "
        "kind is 0 for decode, 1 for prefill, 2 for a slot that is held by a finished request."
    )
    requests: list[ShownRequest] = Field(description="Requests that were not sent on this connection before.")
    events: list[ShownEvent]
    skipped: int | None = Field(
        None, description="Steps before these that were left out: the reader was slow."
    )


class MemoryMap(BaseModel):
    """The state of every KV block."""

    replica: str
    block_size: int
    num_blocks: int
    map: list[list[int]] = Field(
        description="[state, count] for runs of blocks in order. The state is -1 for free, 0 for cached, and otherwise "
        "the number of requests that use the block."
    )
    hit_rate: float = Field(
        description="Share of the prompt tokens found in the prefix cache since the start."
    )
    queries: int
    hits: int
    preemptions: int
    evict_next: list[int] = Field(description="Cached blocks that will be evicted next, in order.")
    groups: dict[str, int] = Field(
        description="Blocks in use by what the layers of a KV group keep, and blocks of cached snapshots; empty if all "
        "layers keep all tokens."
    )
    at: float = Field(description="Seconds since 1970.")


class TraceFile(BaseModel):
    """A Chrome trace, or a recording."""

    traceEvents: list[dict[str, Any]] | None = None  # noqa: N815
    chunks: list[TimelineChunk] | None = None


_REPLICA = ("replica", "string", "Only this replica.")
_STEPS = query_parameters(
    (
        "since",
        "number",
        "Also send what was recorded since this time: seconds since 1970 or, if negative, seconds before now.",
    ),
    _REPLICA,
)
_TRACE = query_parameters(
    ("seconds", "number", f"How far the trace reaches back: at most {MAX_TRACE_SECONDS:g}; 10 by default."),
    _REPLICA,
    ("format", "string", "trace (the default): a Chrome trace; recording: the chunks of /v1/steps."),
)


@router.get("/v1/steps", **documented(None, TimelineChunk, 400, events=TimelineChunk, extra=_STEPS))
async def steps(request: Request) -> Response:
    """Stream the engines' steps as server-sent events: which request had which slot, and what happened to requests.

    Each event is named `steps` and has a chunk of consecutive steps of one replica; there are at most 30 a second.
    Requests of other API keys are shown without their id; the admin key sees everything.
    """
    state = state_of(request)
    since = _number(request, "since", None)
    if since is not None:
        since = time.monotonic() + since if since < 0 else since - state.to_unix
    if state.num_viewers >= MAX_VIEWERS:
        message = f"{MAX_VIEWERS} viewers read the timeline, which is the limit"
        raise ApiError(429, message, code="too_many_viewers", retry_after=10)
    request.scope[ENGINE_RESPONSE] = True  # a slow reader gets fewer steps, so that nothing piles up
    stream = _stream(state, caller_of(request), _replica(request))
    events = _events(state, stream, since)
    return StreamingResponse(events, media_type="text/event-stream", headers=NO_BUFFERING)


async def _events(state: ServerState, stream: TimelineStream, since: float | None) -> AsyncGenerator[bytes]:
    state.num_viewers += 1
    silent = 0.0
    yield b": connected\n\n"
    try:
        async for chunk in stream.chunks(since, POLL):
            if state.draining:
                return
            if chunk is not None:
                silent = 0.0
                last = chunk["steps"]["step"][-1:] or [-1]
                head = f"event: steps\nid: {chunk['replica']}:{last[0]}\ndata: ".encode()
                yield head + msgspec.json.encode(chunk) + b"\n\n"
            elif (silent := silent + POLL) >= SILENCE:
                silent = 0.0
                yield b": no steps\n\n"
    finally:
        state.num_viewers -= 1


def _stream(state: ServerState, caller: Caller, replica: str | None) -> TimelineStream:
    return TimelineStream(state.model.client, seen_by(state, caller), time.monotonic, state.to_unix, replica)


def seen_by(state: ServerState, caller: Caller) -> Callable[[RecordedRequest], bool]:
    """Return a function that tells whether a caller may know a request."""
    sees_all = caller.is_admin or not state.keys.required

    def sees(info: RecordedRequest) -> bool:
        return sees_all or (info.origin is not None and info.origin.key == caller.name)

    return sees


@router.get("/v1/memory", **documented(None, MemoryMap, 400, 404, 503, extra=query_parameters(_REPLICA)))
async def memory(request: Request) -> Response:
    """Return the state of every KV block of a replica, and what the prefix cache will evict next."""
    state = state_of(request)
    replica = _replica(request) or "0"
    try:
        blocks = await state.model.client.read_memory(replica)
    except RequestError as error:
        raise ApiError(404, str(error), code=error.code, param="replica") from None
    return respond(await state.in_service_thread(lambda: _memory_map(state, replica, blocks)))


def _memory_map(state: ServerState, replica: str, blocks: MemoryState) -> MemoryMap:
    states = np.frombuffer(blocks.refs, dtype=np.int32).copy()
    states[np.frombuffer(blocks.empty, dtype=np.int32)] = -1
    begins = np.flatnonzero(np.diff(states, prepend=states[0] - 1)) if len(states) else np.array([], int)
    counts = np.diff(begins, append=len(states))
    return MemoryMap(
        replica=replica,
        block_size=blocks.block_size,
        num_blocks=len(states),
        map=[[value, count] for value, count in zip(states[begins].tolist(), counts.tolist(), strict=True)],
        hit_rate=blocks.num_hits / max(1, blocks.num_queries),
        queries=blocks.num_queries,
        hits=blocks.num_hits,
        preemptions=blocks.num_preemptions,
        evict_next=blocks.evict_next,
        groups=blocks.groups,
        at=blocks.at + state.to_unix,
    )


@router.get("/v1/trace", **documented(None, TraceFile, 400, extra=_TRACE))
async def trace(request: Request) -> Response:
    """Return what the engines did in the last seconds, as a Chrome trace for Perfetto's UI, compressed with gzip."""
    state = state_of(request)
    seconds = _number(request, "seconds", 10.0)
    assert seconds is not None
    if not 0 < seconds <= MAX_TRACE_SECONDS:
        message = f"seconds is {seconds:g}: it must be above 0 and at most {MAX_TRACE_SECONDS:g}"
        raise ApiError(400, message, code="invalid_value", param="seconds")
    form = request.query_params.get("format", "trace")
    if form not in ("trace", "recording"):
        message = f"format is {shown(form)}: it must be trace or recording"
        raise ApiError(400, message, code="invalid_value", param="format")
    stream = _stream(state, caller_of(request), _replica(request))
    chunks = [chunk async for chunk in stream.past(time.monotonic() - seconds)]

    def encode() -> bytes:
        recording = recording_of(chunks)
        data = trace_of(recording) if form == "trace" else recording
        return gzip.compress(json.dumps(data).encode(), 5)

    headers = {
        "content-encoding": "gzip",
        "content-disposition": f'attachment; filename="inflight-{form}-{int(time.time())}.json"',
    }
    body = await state.in_service_thread(encode)
    return Response(body, media_type="application/json", headers=headers)


def _replica(request: Request) -> str | None:
    return request.query_params.get("replica") or None


def _number(request: Request, name: str, default: float | None) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
        if abs(value) < 1e12:
            return value
    except ValueError:
        pass
    message = f"{name} is {shown(text)}: it must be a number"
    raise ApiError(400, message, code="invalid_value", param=name)
