"""The main loop of an engine process: messages in, steps, outputs out. No text, JSON or HTTP."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from inflight.engine.client import check_only_replica, merge
from inflight.engine.core import EngineCore
from inflight.engine.remote import wire
from inflight.engine.stats import EngineStats
from inflight.errors import InflightError
from inflight.events import Delta
from inflight.kv.prefix_cache import CacheChanges
from inflight.processes.channel import RemoteError, Stop, Unreadable
from inflight.request import Request

logger = logging.getLogger(__name__)

MAX_MESSAGES = 128  # handled between two steps: a flood of requests must not keep the engine from stepping
STEPS_PER_COLLECTION = 1 << 14  # steps between garbage collections while the engine is busy
REST_AFTER = 1 << 10  # steps after which garbage is collected as soon as the engine is idle
PREPARING_POLL = 0.001  # seconds between polls while requests are only being prepared
MIN_WAIT = 0.001  # seconds that the socket can wait for
CHECK_EVERY = 1.0  # seconds between checks of the device while the engine is idle


class EngineLoop:
    """Runs an engine core, driven by messages."""

    def __init__(self, core: EngineCore, sockets: wire.EngineSockets) -> None:
        self._core = core
        self._sockets = sockets
        self._outbox = Outbox(sockets.send, core.stats, core.clock)
        # Requests that wait for their preparation before they are added to the core, by handle.
        self._preparing: dict[int, tuple[Request, Future[Any]]] = {}
        self._stopped = False
        self._num_steps_since_collection = 0
        self.last_progress = core.clock()

    def run(self) -> None:
        core = self._core
        while not self._stopped:
            if core.has_work or self._preparing:
                self._take_messages()
            else:
                self._wait_for_message()
            if self._preparing:
                self._add_prepared()
            if self._outbox.has_replies:  # replies need not wait for a step
                self._outbox.flush(idle=not core.has_work)
            stepped = core.has_work and not self._stopped
            if stepped:
                if self._sockets.wait(core.schedule_delay()):
                    continue  # a message arrived that may affect the next step
                deltas = core.step()
                self.last_progress = core.clock()
                self._outbox.put(deltas)
                self._count_step()
            elif self._preparing:
                self._sockets.wait(PREPARING_POLL)
            if core.recorder.is_watched and self._outbox.is_read:
                self._outbox.show(core.take_timeline())
            self._outbox.flush(idle=not core.has_work, stepped=stepped)

    def heartbeat(self) -> wire.Heartbeat:
        """Return the progress of the loop. Called from another thread."""
        working = self._core.has_work  # read first: work that arrives now has not waited since the last step
        since = self._core.clock() - self.last_progress
        return wire.Heartbeat(since, working)

    def _take_messages(self) -> None:
        for _ in range(MAX_MESSAGES):
            message = self._sockets.receive(wait=False)
            if message is None:
                return
            self._handle(message)

    def _wait_for_message(self) -> None:
        """Collect garbage if due, then wait for a message."""
        if self._num_steps_since_collection >= REST_AFTER:
            self._collect_garbage(2)
        recorder, clock = self._core.recorder, self._core.clock
        while not self._sockets.wait(min(CHECK_EVERY, recorder.seconds_until_due(clock()) + MIN_WAIT)):
            self._core.check()
            if recorder.seconds_until_due(clock()) == 0 and self._outbox.is_read:
                return
        message = self._sockets.receive(wait=True)
        self.last_progress = self._core.clock()
        if message is not None:
            self._handle(message)
            self._take_messages()

    def _count_step(self) -> None:
        self._num_steps_since_collection += 1
        if self._num_steps_since_collection >= STEPS_PER_COLLECTION:
            self._collect_garbage(1)

    def _collect_garbage(self, generation: int) -> None:
        self._num_steps_since_collection = 0
        gc.collect(generation)

    # ---- messages ----

    def _handle(self, message: wire.ToEngine | Unreadable) -> None:
        match message:
            case wire.Add() | wire.Abort() | wire.Describe() | wire.ReadMemory():
                self._handle_call(message)
            case Unreadable(call, error):
                self._outbox.reply(wire.Reply(call, remote_error=RemoteError.from_exception(error)))
            case wire.RunCommand(call, command):
                try:
                    self._core.run_command(command)
                except InflightError as error:  # the engine continues unchanged
                    self._outbox.reply(wire.Reply(call, remote_error=RemoteError.from_exception(error)))
                else:
                    self._outbox.reply(wire.Reply(call))
            case wire.Ack(num_read):
                self._outbox.taken(num_read)
            case wire.WatchCache(enabled):
                self._outbox.cache_changes = changes = CacheChanges() if enabled else None
                self._core.watch_cache(changes)
            case wire.WatchTimeline(enabled):
                self._core.recorder.watch(enabled)
            case wire.ReadTimeline(call, query):
                self._outbox.reply(wire.Reply(call, timeline=self._core.read_timeline(query)))
            case Stop():
                self._stopped = True
            case _:
                logger.warning("dropped an unexpected %s message", type(message).__name__)

    def _handle_call(self, message: wire.Add | wire.Abort | wire.Describe | wire.ReadMemory) -> None:
        """Handle a message whose errors are reported only to its sender."""
        try:
            match message:
                case wire.Add():
                    self._add(message)
                case wire.Abort():
                    self._abort(message)
                case wire.Describe(call, handle):
                    request_id = self._outbox.id_of(handle)
                    state = None if request_id is None else self._core.describe(request_id)
                    self._outbox.reply(wire.Reply(call, state=state))
                case wire.ReadMemory(call, replica):
                    check_only_replica(replica)
                    self._outbox.reply(wire.Reply(call, memory=self._core.read_memory()))
        except Exception as error:
            if not isinstance(error, InflightError):
                logger.exception("failed to handle a %s message", type(message).__name__)
            if message.call is not None:
                self._outbox.reply(wire.Reply(message.call, remote_error=RemoteError.from_exception(error)))

    def _add(self, message: wire.Add) -> None:
        self._core.check_queue_limit(len(self._preparing))
        request = Request(message.request)
        prepared = self._core.prepare(request)
        if prepared is None:
            self._enter(message.call, request)
        else:
            self._preparing[message.call] = request, prepared

    def _add_prepared(self) -> None:
        """Add the requests whose preparation is done, in order of arrival."""
        done = [handle for handle, (_, prepared) in self._preparing.items() if prepared.done()]
        for handle in done:  # a failed preparation will show in a step
            self._enter(handle, self._preparing.pop(handle)[0])

    def _enter(self, handle: int, request: Request) -> None:
        try:
            self._core.add(request)
        except Exception as error:  # reported only to the owner of the request
            self._outbox.reply(wire.Reply(handle, remote_error=RemoteError.from_exception(error)))
            return
        self._outbox.open(request.request_id, handle)
        self._outbox.reply(wire.Reply(handle))

    def _abort(self, message: wire.Abort) -> None:
        if message.handle in self._preparing:
            request, prepared = self._preparing.pop(message.handle)
            prepared.cancel()
            self._enter(message.handle, request)
        request_id = self._outbox.id_of(message.handle)
        num_freed = 0
        if request_id is not None:
            num_freed, deltas = self._core.abort(request_id, message.reason)
            self._outbox.put(deltas)
        if message.call is not None:
            self._outbox.reply(wire.Reply(message.call, num_freed))


WINDOW = 64  # unacknowledged StepOutputs; further ones are merged here
STATS_EVERY = 0.05  # seconds between statistics while the engine is busy
MAX_CHUNKS = 64  # chunks of the timeline kept for a client that does not read


class Outbox:
    """Sends at once while the client keeps up, and otherwise merges the deltas of each request.

    A client that is stuck therefore costs memory bounded by the outputs, and the engine never waits for it.
    """

    def __init__(
        self,
        send: Callable[[wire.StepOutputs], None],
        stats: Callable[[], EngineStats],
        clock: Callable[[], float],
    ) -> None:
        self._send = send
        self._stats = stats
        self._clock = clock
        self._handles: dict[str, int] = {}  # by request id, for requests in the engine
        self._ids: dict[int, str] = {}  # by handle
        self._deltas: dict[int, Delta] = {}  # by handle
        self._replies: list[wire.Reply] = []
        self._lost: list[tuple[int, RemoteError]] = []
        self._timeline: deque[tuple[str, bytes]] = deque(maxlen=MAX_CHUNKS)
        self.cache_changes: CacheChanges | None = None  # None unless they are observed
        self._stats_at = -STATS_EVERY
        self._num_sent = self._num_taken = 0

    def open(self, request_id: str, handle: int) -> None:
        """Register a request that was added, until its last delta is put here."""
        self._handles[request_id] = handle
        self._ids[handle] = request_id

    def id_of(self, handle: int) -> str | None:
        return self._ids.get(handle)

    def reply(self, reply: wire.Reply) -> None:
        self._replies.append(reply)

    @property
    def has_replies(self) -> bool:
        return bool(self._replies)

    def show(self, data: bytes | None, replica: str = "0") -> None:
        """Send a chunk of the timeline, if there is one."""
        if data is not None:
            self._timeline.append((replica, data))

    @property
    def is_read(self) -> bool:
        """Whether the client keeps up."""
        return self._num_sent - self._num_taken < WINDOW

    def put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            handle = self._handles[delta.request_id]
            if delta.finish_reason is not None:
                del self._handles[delta.request_id], self._ids[handle]
            earlier = self._deltas.get(handle)
            self._deltas[handle] = delta if earlier is None else merge(earlier, delta)

    def lose(self, handle: int, problem: RemoteError) -> None:
        """End a request with this error, after the deltas that were put here."""
        del self._handles[self._ids.pop(handle)]
        self._lost.append((handle, problem))

    def taken(self, num_taken: int) -> None:
        """Note that the client has read this many StepOutputs."""
        self._num_taken = max(self._num_taken, min(num_taken, self._num_sent))

    def flush(self, idle: bool, stepped: bool = False) -> None:
        """Send pending output if the client keeps up.

        A step without output still changes the statistics. These are then sent alone, at a bounded rate, because a long
        prompt takes many such steps.
        """
        has_results = self._deltas or self._replies or self._lost
        has_output = has_results or self._timeline or self.cache_changes
        if not has_output and not (stepped and (idle or self._clock() - self._stats_at >= STATS_EVERY)):
            return
        if not self.is_read:
            return
        handles, token_ids, counts, others = [], [], [], []
        for handle, delta in self._deltas.items():
            has_only_tokens = (
                delta.finish_reason is None and delta.logprobs is None and delta.prompt_logprobs is None
            )
            if has_only_tokens and delta.token_ids:
                handles.append(handle)
                token_ids += delta.token_ids
                counts.append(len(delta.token_ids))
            else:
                others.append((handle, delta))
        if len(handles) == counts.count(1):
            counts = []
        now, stats = self._clock(), None
        if idle or self._replies or now - self._stats_at >= STATS_EVERY:
            stats, self._stats_at = self._stats(), now
        cache = None if self.cache_changes is None else self.cache_changes.take()
        outputs = wire.StepOutputs(
            handles, token_ids, counts, others, self._replies, stats, cache, self._lost, list(self._timeline)
        )
        self._send(outputs)
        self._num_sent += 1
        self._deltas, self._replies, self._lost = {}, [], []
        self._timeline.clear()
