"""One process of ours, from its start to its end, and the sockets to it. Used in one event loop.

Where it runs, and how it is started and ended there, is its host's business (`host.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic

import zmq
from zmq.utils.monitor import parse_monitor_message

from inflight.engine.remote.host import ProcessHost, ProcessNotStartedError
from inflight.engine.remote.wire import (
    SECRET_LENGTH,
    Codec,
    ConnectionInfo,
    Heartbeat,
    Message,
    MessageT,
    Stop,
    ToFront,
)

logger = logging.getLogger(__name__)

MAX_FRAMES = 64  # taken at a time, so that others get their turn
MAX_IPC_PATH = 100  # the system's limit is a little above
END_TIMEOUT = 5.0  # seconds that a process gets to end by itself
LAST_WORDS_TIMEOUT = 5.0  # seconds for what a dead process has said to get here
CONNECTION_TIMEOUT = 0.5  # seconds after its end to see that it had connected at all
CUT_TIMEOUT = 2.0  # seconds without a word after a connection has ended, until it counts as the engine's
POLL = 0.01
FOLDER = "inflight-"  # how folders of sockets begin
MAX_FOLDER_AGE = 3600.0  # seconds; a process connects, and its folder goes, long before
NUM_DESCRIPTORS = 40  # that a process and its sockets need here, generously


class ConnectedProcess(Generic[MessageT]):
    """A process with its sockets: `send` it messages, and `receive` what it says."""

    def __init__(self, host: ProcessHost, incoming: Any, log_format: str) -> None:
        """`incoming` are the types of what it says. Raises ProcessNotStartedError, and leaves nothing behind, where
        the system has not what it needs."""
        self.exited = asyncio.Event()  # set once the process is gone and all it said is here
        self.was_started = True  # as far as is known
        self.reason: str | None = None  # why it ended, where that is known
        self._inbox: deque[MessageT] = deque()  # bounded by what the engine sends before it waits for an Ack
        self._arrived = asyncio.Event()  # something is in the inbox, or nothing will ever be again
        self._loop = asyncio.get_running_loop()
        self._address = host.address
        self._killed = False
        secret = secrets.token_bytes(SECRET_LENGTH)
        self.codec: Codec[MessageT] = Codec(secret, incoming)
        self._connected = self._disconnected = False
        self._spoke = self._beats = False  # whether it has said something, and that it lives
        self._num_heard = 0
        self._folder: str | None = None
        self._context = zmq.Context()
        try:
            _check_descriptors()
            server_key = self._open_sockets()
            connection = ConnectionInfo(
                self._up.get_string(zmq.LAST_ENDPOINT),
                self._down.get_string(zmq.LAST_ENDPOINT),
                secret.hex(),
                os.getpid(),
                logging.getLogger("inflight").getEffectiveLevel(),
                log_format,
                server_key,
            )
            self._hosted = host.hosted(connection)
            # The thread that starts a process must live as long as it does: for the system, it is the parent.
            threading.Thread(target=self._live, name="inflight-process", daemon=True).start()
        except (OSError, zmq.ZMQError, RuntimeError) as error:  # the last: no more threads
            self._context.destroy(linger=0)
            self._remove_folder()
            raise ProcessNotStartedError(f"the {host.name} could not be started: {error}") from error
        self._loop.add_reader(self._up.fileno(), self.take_frames)
        if self._address is not None:
            self._loop.add_reader(self._monitor.fileno(), self._watch_connection)

    def _open_sockets(self) -> str | None:
        """Sockets that only this user can reach; where there are no such, the secret alone keeps others out. For an
        engine on another machine: encrypted ones, whose key is returned."""
        self._up = self._context.socket(zmq.PULL)
        self._down = self._context.socket(zmq.PUSH)
        for socket in (self._up, self._down):
            socket.set_hwm(0)  # what is on its way is bounded by the engine's outbox and by the open calls
            socket.linger = 0
        self._monitor = self._up.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        if self._address is not None:
            return self._listen(self._address)
        _remove_leftovers()
        self._folder = tempfile.mkdtemp(prefix=FOLDER)  # mode 0700
        if zmq.has("ipc") and len(self._folder) + len("/down") <= MAX_IPC_PATH:
            self._up.bind(f"ipc://{self._folder}/up")
            self._down.bind(f"ipc://{self._folder}/down")
            return None
        self._remove_folder()
        for socket in (self._up, self._down):
            socket.bind("tcp://127.0.0.1:*")
        return None

    def _listen(self, address: str) -> str:
        """At an address of this machine, for whoever knows the key."""
        public, private = zmq.curve_keypair()
        host = f"[{address}]" if ":" in address else address
        for socket in (self._up, self._down):
            socket.ipv6 = ":" in address
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = public, private
            socket.bind(f"tcp://{host}:*")
        return public.decode()

    # ---- its thread ----

    def _live(self) -> None:
        was_started = True
        try:
            reason = self._hosted.live()
        except ProcessNotStartedError as error:
            reason, was_started = str(error), False
        # A mistake of ours, or of Ray's: whoever waits for the end must not wait for ever.
        except Exception as error:
            logger.exception("a process could not be watched")
            reason, was_started = f"it could not be watched: {type(error).__name__}: {error}", False
        self._post(lambda: self._end(reason, was_started))

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(callback)

    # ---- the event loop ----

    def _end(self, reason: str, was_started: bool) -> None:
        self._ending = self._loop.create_task(self._hear_and_close(reason, was_started))

    async def _hear_and_close(self, reason: str, was_started: bool) -> None:
        """What it said before its end may still be on its way; the end of its connection comes behind it."""
        self._look_at_connection()
        # Of a machine that is gone there may never be any.
        if was_started and not (self._killed and self._address is not None):
            await self._wait(CONNECTION_TIMEOUT, lambda: self._connected)
            if self._connected:
                await self._wait(LAST_WORDS_TIMEOUT, lambda: self._disconnected)
        while self.take_frames():
            pass
        self.was_started = was_started
        self.reason = self.reason or reason
        self._close_sockets()
        self.exited.set()
        self._arrived.set()

    async def _wait(self, seconds: float, happened: Callable[[], bool]) -> None:
        """For what becomes of the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not happened():
                    await asyncio.sleep(POLL)
                    self._look_at_connection()

    def _look_at_connection(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._connected = self._connected or event == zmq.EVENT_ACCEPTED
            self._disconnected = self._disconnected or event == zmq.EVENT_DISCONNECTED

    def _watch_connection(self) -> None:
        """A connection may end without a word of the engine's host. It need not have been the engine's, on a network:
        then the engine is heard again."""
        was_disconnected = self._disconnected
        self._look_at_connection()
        if self._disconnected and not was_disconnected:
            while self.take_frames():  # what was said before
                pass
            self._loop.call_later(CUT_TIMEOUT, self._check_still_heard, self._num_heard)

    def _check_still_heard(self, num_heard: int) -> None:
        if self.exited.is_set():
            return
        if self._num_heard == num_heard and self._beats:
            self.kill("the connection to the engine was cut")
        else:
            self._disconnected = False

    def _close_sockets(self) -> None:
        if not self._up.closed:
            self._loop.remove_reader(self._up.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._up.disable_monitor()
            self._monitor.close()
            self._up.close()
            self._down.close()
            self._context.term()
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def unread(self) -> Collection[MessageT]:
        """What has come and no one has received yet."""
        return self._inbox

    async def receive(self, seconds: float) -> MessageT | None:
        """The next message; None if none comes in time, or ever."""
        if not self._inbox and not self.exited.is_set():
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
        return self._inbox.popleft() if self._inbox else None

    def take_frames(self) -> bool:
        """Take in what has come. Whether there may be more."""
        for _ in range(MAX_FRAMES):
            try:
                frame = self._up.recv(zmq.NOBLOCK)
            except zmq.ZMQError:  # no more, or the socket was closed by what the last message said
                return False
            message = self.codec.decode(frame)
            if message is None:
                continue
            if not self._spoke:
                # It speaks only when spoken to, so it has both sockets: their names are needed no more, and
                # nothing is left behind however this process ends.
                self._spoke = True
                self._remove_folder()
            self._num_heard += 1
            self._beats = self._beats or isinstance(message, Heartbeat)
            self._inbox.append(message)
            self._arrived.set()
        self._loop.call_soon(self.take_frames)
        return True

    async def greet(self, first: Callable[[], Message]) -> None:
        """Send the first message, as it is by then, once the process is there to take it."""
        while not self._down.closed:
            try:
                return self._down.send(self.codec.encode(first()), zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(POLL)
        return None

    def send(self, message: Message) -> None:
        self.send_frame(self.codec.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        if not self._down.closed:
            with contextlib.suppress(zmq.Again):  # no one is at the other end: its exit will be noticed
                self._down.send(frame, zmq.NOBLOCK)

    def kill(self, reason: str | None = None) -> None:
        """End it now."""
        self.reason = self.reason or reason
        self._killed = True
        self._hosted.kill()

    async def end(self) -> None:
        """Let it end by itself for a moment, then kill it. Returns when it is gone."""
        try:
            self.send(Stop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT):
                    await self.exited.wait()
        finally:
            self.kill()
            await self.exited.wait()

    @property
    def process_id(self) -> int | None:
        """On this machine."""
        return self._hosted.process_id

    @property
    def is_waiting_for_room(self) -> bool:
        """Whether no machine was found for it yet."""
        return self._hosted.is_waiting_for_room


class EngineProcess(ConnectedProcess[ToFront]):
    """One that has an engine."""

    def __init__(self, host: ProcessHost, log_format: str) -> None:
        super().__init__(host, ToFront, log_format)


def _remove_leftovers() -> None:
    """Folders of sockets whose owner was killed before its process had connected. Nothing else is touched."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to look into
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > MAX_FOLDER_AGE:
                left = list(folder.iterdir())
                if {path.name for path in left} <= {"up", "down"} and all(map(Path.is_socket, left)):
                    shutil.rmtree(folder, ignore_errors=True)


def _check_descriptors() -> None:
    """Raise OSError now if there are too few: libzmq ends the process when it finds none at a bad moment."""
    taken: list[int] = []
    try:
        for _ in range(NUM_DESCRIPTORS):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)
