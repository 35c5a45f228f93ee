"""The engine process: a loop over a core that talks to its front through two sockets, and nothing else.

Started by `engine/child_process.py` as `python -m inflight.engine.worker`, or by Ray (`ray_cluster/actor.py`). No text,
JSON or HTTP in here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from inflight.config import EngineConfig
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.engine.history import state_of
from inflight.engine.lifeline import die_with, ignore_signals
from inflight.engine.outbox import Outbox
from inflight.engine.remote_link import RemoteLink
from inflight.engine.sleep import Command
from inflight.engine.wire import (
    Abort,
    Ack,
    Add,
    Codec,
    ConnectionInfo,
    Describe,
    Failed,
    Heartbeat,
    Message,
    Progress,
    Ready,
    RemoteError,
    Reply,
    Start,
    Stop,
    Stopped,
    Tell,
    ToEngine,
    Watch,
    WatchCache,
)
from inflight.errors import EngineError
from inflight.kv.cache_changes import CacheChanges
from inflight.logs import configure_logging
from inflight.registry import Registry
from inflight.request import Request

logger = logging.getLogger("inflight.engine.worker")  # as the main module it would be called __main__

Build = Callable[[EngineConfig, Callable[[int, int], None]], tuple[EngineCore, ModelFacts]]
BUILDERS: Registry[Build] = Registry("builder", {"model": "inflight.loading:load_core"})

MAX_MESSAGES = 128  # taken between two steps: a flood of requests must not keep the engine from stepping
STEPS_PER_COLLECTION = 1 << 14  # of garbage, while steps follow each other
REST_AFTER = 1 << 10  # steps after which garbage is collected as soon as there is nothing to do
PREPARING_POLL = 0.001  # seconds, while there is nothing to do but to wait for a request to be prepared
CHECK_EVERY = 1.0  # seconds, of what steps are run on while there are none
LINGER = 2000  # milliseconds for the last words


class EngineSockets:
    """The two sockets. Any thread may send; one receives."""

    def __init__(self, connection: ConnectionInfo) -> None:
        secret = bytes.fromhex(connection.secret)
        self.incoming: Codec[ToEngine] = Codec(secret, ToEngine)
        self._outgoing: Codec[ToEngine] = Codec(secret, ToEngine)
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PUSH)
        self._down = self._context.socket(zmq.PULL)
        for socket in (self._up, self._down):
            # No limit here: the outbox has one. So sending neither blocks nor drops.
            socket.set_hwm(0)
            socket.linger = LINGER
        self._link = None if connection.server_key is None else RemoteLink(connection.server_key)
        for socket, endpoint in ((self._up, connection.up), (self._down, connection.down)):
            if self._link is None:
                socket.connect(endpoint)
            else:
                self._link.connect(socket, endpoint)
        self._lock = threading.Lock()

    @property
    def is_remote(self) -> bool:
        """Whether the front is on another machine, perhaps."""
        return self._link is not None

    def send(self, message: Message) -> None:
        with self._lock:
            self._up.send(self._outgoing.encode(message))

    def receive(self, wait: bool) -> ToEngine | None:
        """The next message; None if there is none yet, or if it was not one."""
        try:
            return self.incoming.decode(self._down.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> bool:
        """Whether a message comes within that time."""
        milliseconds = int(1000 * seconds)
        return milliseconds > 0 and bool(self._down.poll(milliseconds))

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._up.close()
            self._down.close()
        self._context.term()


class EngineLoop:
    """Messages in, steps, outputs out."""

    def __init__(self, core: EngineCore, sockets: EngineSockets) -> None:
        self._core = core
        self._sockets = sockets
        self._outbox = Outbox(sockets.send, core.stats, core.clock)
        # Requests that are not in the core yet, by handle.
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
                self._rest()
            if self._preparing:
                self._add_prepared()
            if self._outbox.has_replies:  # whoever asked need not wait for a step
                self._outbox.flush(idle=not core.has_work)
            if core.has_work and not self._stopped:
                if self._sockets.wait(core.schedule_delay()):
                    continue  # what comes now can be part of the next step
                deltas = core.step()
                self.last_progress = core.clock()
                self._outbox.put(deltas)
                self._count_step()
            elif self._preparing:
                self._sockets.wait(PREPARING_POLL)
            self._outbox.flush(idle=not core.has_work)

    def heartbeat(self) -> Heartbeat:
        """How the loop does. Called by another thread."""
        working = self._core.has_work  # asked first: work that comes now has not waited since the last step
        since = self._core.clock() - self.last_progress
        return Heartbeat(since, working, self._sockets.incoming.num_dropped)

    def _take_messages(self) -> None:
        for _ in range(MAX_MESSAGES):
            message = self._sockets.receive(wait=False)
            if message is None:
                return
            self._handle(message)

    def _rest(self) -> None:
        """Nothing to do: clean up, then wait for something."""
        if self._num_steps_since_collection >= REST_AFTER:
            self._collect_garbage(2)
        while not self._sockets.wait(CHECK_EVERY):
            self._core.check()
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

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                self._abort(message)
            case Describe(call, handle):
                request_id = self._outbox.id_of(handle)
                state = None if request_id is None else state_of(self._core, request_id)
                self._outbox.reply(Reply(call, state=state))
            case Tell(call, command):
                self._tell(call, command)
            case Ack(num_taken):
                self._outbox.taken(num_taken)
            case Watch(wanted):
                observers = self._core.observers
                with contextlib.suppress(ValueError):
                    observers.remove(self._outbox.observe)
                if wanted:
                    observers.append(self._outbox.observe)
            case WatchCache(wanted):
                self._outbox.cache_changes = changes = CacheChanges() if wanted else None
                self._core.scheduler.blocks.cache.report(changes)
            case Stop():
                self._stopped = True
            case _:
                logger.warning("dropped a %s that came too late", type(message).__name__)

    def _add(self, message: Add) -> None:
        request = message.request.request()
        prepared = self._core.prepare(request)
        if prepared is None:
            self._enter(message.call, request)
        else:
            self._preparing[message.call] = request, prepared

    def _add_prepared(self) -> None:
        """In the order in which they came, but for those that have to wait longer."""
        done = [handle for handle, (_, prepared) in self._preparing.items() if prepared.done()]
        for handle in done:  # well or not: a step finds out
            self._enter(handle, self._preparing.pop(handle)[0])

    def _enter(self, handle: int, request: Request) -> None:
        try:
            self._core.add(request)
        except Exception as error:  # a request that cannot be added is its owner's trouble alone
            self._outbox.reply(Reply(handle, remote_error=RemoteError.of(error)))
            return
        self._outbox.open(request.request_id, handle)
        self._outbox.reply(Reply(handle))

    def _tell(self, call: int, command: Command) -> None:
        try:
            self._core.obey(command)
        except EngineError as error:  # it goes on as it was
            self._outbox.reply(Reply(call, remote_error=RemoteError.of(error)))
        else:
            self._outbox.reply(Reply(call))

    def _abort(self, message: Abort) -> None:
        if message.handle in self._preparing:
            self._enter(message.handle, self._preparing.pop(message.handle)[0])
        request_id = self._outbox.id_of(message.handle)
        num_freed = 0
        if request_id is not None:
            num_freed, deltas = self._core.abort(request_id, message.reason)
            self._outbox.put(deltas)
        if message.call is not None:
            self._outbox.reply(Reply(message.call, num_freed))


# ---- the process ----


def main() -> int:
    ignore_signals()
    line = sys.stdin.buffer.readline()
    if not line:  # whoever started this one was told to stop meanwhile
        return 0
    connection = msgspec.json.decode(line, type=ConnectionInfo)
    die_with(connection.parent_id)
    return serve(connection)


def serve(connection: ConnectionInfo) -> int:
    """An engine for whoever is at the other end, until told to stop. The code that its process is to end with."""
    configure_logging(connection.log_level, connection.log_format, process="engine")
    sockets = EngineSockets(connection)
    try:
        return _serve(sockets)
    finally:
        sockets.close()


def _serve(sockets: EngineSockets) -> int:
    start = sockets.receive(wait=True)
    while not isinstance(start, Start):
        start = sockets.receive(wait=True)
    ahead = start.now - time.monotonic() if sockets.is_remote else 0.0
    try:
        config = EngineConfig.create(**start.options)
        core, facts = BUILDERS.get(start.build)(config, lambda *done: sockets.send(Progress(*done)))
    except Exception as error:
        logger.debug("the engine could not be built", exc_info=True)
        sockets.send(Failed(RemoteError.of(error)))
        return 1
    if sockets.is_remote:  # records have times of one clock: the front's
        core.clock = lambda: time.monotonic() + ahead
    # What is there now stays until the end: no collection need look at it. Later ones wait for their time.
    gc.collect()
    gc.freeze()
    gc.disable()
    loop = EngineLoop(core, sockets)
    _in_thread(lambda: _send_heartbeats(sockets, loop, start.heartbeat), "heartbeat")
    sockets.send(Ready(facts, core.stats()))
    try:
        loop.run()
    except Exception as error:
        logger.exception("the engine loop stopped")
        sockets.send(
            Stopped(f"the engine stopped: {RemoteError.of(error).kind}: {RemoteError.of(error).text}")
        )
        return 1
    core.close()
    return 0


def _send_heartbeats(sockets: EngineSockets, loop: EngineLoop, interval: float) -> None:
    while True:
        with contextlib.suppress(zmq.ZMQError):  # the socket was closed
            sockets.send(loop.heartbeat())
        time.sleep(interval)


def _in_thread(function: Callable[[], None], name: str) -> None:
    threading.Thread(target=function, name=f"inflight-{name}", daemon=True).start()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the system takes back memory faster than the libraries do
