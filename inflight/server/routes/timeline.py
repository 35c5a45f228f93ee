"""The timeline of the engines: steps as they happen, memory, and traces to download."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from inflight.engine.client import MemoryState
from inflight.entrypoints.offline import paused_collection
from inflight.errors import RequestError, shown
from inflight.server.access.keys import Caller, counted
from inflight.server.errors import ApiError, invalid
from inflight.server.http.bodies import ENGINE_RESPONSE
from inflight.server.openapi import documented, query_parameters, respond
from inflight.server.schemas import optional
from inflight.server.state import ServerState, caller_of, state_of
from inflight.timeline.chunks import RecordedRequest
from inflight.timeline.stream import ChunkConverter, TimelineStream
from inflight.timeline.trace import FileWriter

T = TypeVar("T")

router = APIRouter()

MAX_VIEWERS = 16  # of /v1/steps, for each key in one process
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
    others: list[int] = Field(description="Slots in use by requests that you may not see.")


class KVSize(BaseModel):
    blocks: int
    block_size: int = Field(description="Tokens in a block.")


class ShownRequest(BaseModel):
    """A request on the timeline: one of yours or, for the admin key and without keys, anyone's."""

    number: int = Field(description="Unique on its replica.")
    arrived: float = Field(description="Seconds since 1970.")
    id: str
    answer: int = Field(description="Index of the answer, where a request has several.")
    key: str = Field(description="The name of the API key.")
    route: str
    prompt_tokens: int
    priority: int
    text: str | None = optional("The prompt, shortened; only with --timeline-text.")


class ShownEvent(BaseModel):
    type: Literal["arrive", "admit", "preempt", "finish", "abort"]
    at: float = Field(description="Seconds since 1970.")
    request: int = Field(description="The number of the request.")
    step: int | None = None
    slot: int | None = optional("The slot of an admission.")
    cached: int | None = optional("Tokens that an admission found in the prefix cache.")
    reason: str | None = None


class TimelineChunk(BaseModel):
    """Consecutive steps of one engine, and what happened since the chunk before."""

    replica: str
    slots: int = Field(description="The most requests that can run at once (max_num_seqs).")
    budget: int = Field(description="The most tokens of one step (max_num_batched_tokens).")
    kv: KVSize
    steps: RecordedStepColumns
    failed: dict[str, str] | None = optional("Messages of failed steps, by number.")
    runs: list[list[int]] = Field(
        description="What slots did: [slot, request, kind, first step, steps, tokens per step, first token, outputs]. "
        "kind is 0 for decode, 1 for prefill, 2 for a slot that is held by a finished request."
    )
    requests: list[ShownRequest] = Field(description="Requests that were not sent on this connection before.")
    events: list[ShownEvent]
    skipped: int | None = optional("Steps before these that were left out: the reader was slow.")


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
    """A Chrome trace, or a recording. It has what `/v1/steps` shows you."""

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


class AdmittedStream(StreamingResponse):
    """A stream that takes its place when it is admitted, before its first byte, and leaves it before its last one."""

    def __init__(
        self, place: AbstractAsyncContextManager[None], content: AsyncGenerator[bytes], **options: Any
    ) -> None:
        super().__init__(self._pieces(), **options)
        self._place, self._content = place, content
        self._taken = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ENGINE_RESPONSE] = True  # made at the pace of its reader, so that nothing piles up
        async with self._taken:
            await self._taken.enter_async_context(self._place)
            await self._taken.enter_async_context(aclosing(self._content))
            await super().__call__(scope, receive, send)

    async def _pieces(self) -> AsyncGenerator[bytes]:
        async for piece in self._content:
            yield piece
        await self._taken.aclose()  # once a client has read the end, it may have the next one


@router.get("/v1/steps", **documented(None, TimelineChunk, 400, events=TimelineChunk, extra=_STEPS))
async def steps(request: Request) -> Response:
    """Stream the engines' steps as server-sent events: which request had which slot, and what happened to requests.

    Each event is named `steps` and has a chunk of consecutive steps of one replica; new steps come at most 30 times a
    second. For requests of other API keys, only the number of their slots is shown; the admin key sees everything.
    """
    state, caller = state_of(request), caller_of(request)
    since = _number(request, "since", None)
    if since is not None:
        since = time.monotonic() + since if since < 0 else since - state.to_unix
    events = _events(state, _stream(state, _converter(state, caller), request), since)
    place = _viewing(state, caller)
    return AdmittedStream(place, events, media_type="text/event-stream", headers=NO_BUFFERING)


@asynccontextmanager
async def _viewing(state: ServerState, caller: Caller) -> AsyncGenerator[None]:
    """Take one of a key's places for viewers. Raises ApiError if there is none."""
    reader = _reader(state, caller)
    if state.viewers[reader] >= MAX_VIEWERS:
        message = f"too many viewers of the timeline: the limit is {MAX_VIEWERS} for each API key"
        raise ApiError(429, message, code="too_many_viewers", retry_after=10)
    state.viewers[reader] += 1
    try:
        yield
    finally:
        state.viewers[reader] -= 1


async def _events(state: ServerState, stream: TimelineStream, since: float | None) -> AsyncGenerator[bytes]:
    silent = 0.0
    yield b": connected\n\n"
    async with aclosing(stream.chunks(since, POLL)) as parts:
        async for part in parts:
            if state.draining:
                return
            if part is not None:
                silent = 0.0
                head = f"event: steps\nid: {part.replica}:{part.last_step}\ndata: ".encode()
                yield head + part.data + b"\n\n"
            elif (silent := silent + POLL) >= SILENCE:
                silent = 0.0
                yield b": no steps\n\n"


def _stream(state: ServerState, converter: ChunkConverter, request: Request) -> TimelineStream:
    return TimelineStream(state.model.client, converter, time.monotonic, _replica(request))


def _converter(state: ServerState, caller: Caller) -> ChunkConverter:
    """Return the converter that all readers of a key share."""

    async def in_thread(function: Callable[[], T]) -> T:
        def run() -> T:
            with paused_collection():  # it would scan all requests in the log, again and again
                return function()

        return await state.in_service_thread(run)

    reader = _reader(state, caller)
    converter = state.converters.get(reader)
    if converter is None:
        sees = None if reader is None else seen_by(state, caller)
        converter = ChunkConverter(state.model.client, sees, state.to_unix, in_thread)
        state.converters[reader] = converter
    return converter


def _reader(state: ServerState, caller: Caller) -> str | None:
    """Return the name of the key whose requests a caller may see, or None if it may see all."""
    is_alone = all(other.name == caller.name for other in state.keys.callers)
    return None if caller.is_admin or is_alone else caller.name


def seen_by(state: ServerState, caller: Caller) -> Callable[[RecordedRequest], bool]:
    """Return a function that tells whether a caller may know a request."""
    reader = _reader(state, caller)

    def sees(info: RecordedRequest) -> bool:
        return reader is None or (info.origin is not None and info.origin.key == reader)

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


@router.get("/v1/trace", **documented(None, TraceFile, 400, 429, extra=_TRACE))
async def trace(request: Request) -> Response:
    """Return what the engines did in the last seconds, as a Chrome trace for Perfetto's UI, compressed with gzip."""
    state, caller = state_of(request), caller_of(request)
    seconds = _number(request, "seconds", 10.0)
    assert seconds is not None
    if not 0 < seconds <= MAX_TRACE_SECONDS:
        message = f"seconds is {seconds:g}: it must be above 0 and at most {MAX_TRACE_SECONDS:g}"
        raise invalid("seconds", message)
    form = request.query_params.get("format", "trace")
    if form not in ("trace", "recording"):
        raise invalid("format", f"format is {shown(form)}: it must be trace or recording")
    converter = _converter(state, caller)
    stream = _stream(state, converter, request)
    headers = {
        "content-encoding": "gzip",
        "content-disposition": f'attachment; filename="inflight-{form}-{int(time.time())}.json"',
    }
    content = _file(converter, stream, time.monotonic() - seconds, FileWriter(as_trace=form == "trace"))
    return AdmittedStream(_tracing(state, caller), content, media_type="application/json", headers=headers)


@asynccontextmanager
async def _tracing(state: ServerState, caller: Caller) -> AsyncGenerator[None]:
    """Count a trace as a request of its key. Raises ApiError if the key reads one already or has reached a limit."""
    reader = _reader(state, caller)
    if reader in state.tracing:
        message = "another trace is still being written: the limit is one at a time for each API key"
        raise ApiError(429, message, code="too_many_traces", retry_after=5)
    state.tracing.add(reader)
    try:
        async with nullcontext() if caller.is_admin else counted(state.admission, caller):
            yield
    finally:
        state.tracing.remove(reader)


async def _file(
    converter: ChunkConverter, stream: TimelineStream, since: float, writer: FileWriter
) -> AsyncGenerator[bytes]:
    """Yield a compressed file chunk by chunk, at the pace of its reader."""
    async with aclosing(stream.past(since)) as parts:
        async for part in parts:
            data = await converter.work(partial(writer.add, part.data))
            if data:
                yield data
    yield await converter.work(writer.end)


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
    raise invalid(name, f"{name} is {shown(text)}: it must be a number")
