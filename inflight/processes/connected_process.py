"""The parent's end of the message channel: one process from its start to its end. Used in one event loop."""

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

from inflight.processes.channel import SECRET_LENGTH, Codec, ConnectionInfo, Message, MessageT, Stop
from inflight.processes.child import ProcessHost, ProcessNotStartedError

logger = logging.getLogger(__name__)

MAX_FRAMES = 64  # read in one turn of the event loop, so that other tasks get theirs
MAX_IPC_PATH = 100  # the system's limit is slightly larger
END_TIMEOUT = 5.0  # seconds for a process to exit by itself
LAST_MESSAGES_TIMEOUT = 5.0  # seconds for the messages of a dead process to arrive
CONNECTION_TIMEOUT = 0.5  # seconds after its end to learn that it had connected at all
CUT_TIMEOUT = 2.0  # seconds of silence after a connection was closed until it counts as the process's
POLL = 0.01
FOLDER = "inflight-"  # the prefix of folders with sockets
MAX_FOLDER_AGE = 3600.0  # seconds; a process connects, and its folder is removed, long before
NUM_DESCRIPTORS = 40  # a generous bound on what a process and its sockets need here


class ConnectedProcess(Generic[MessageT]):
    """A process and the two sockets to it: `send` messages to it and `receive` those from it."""

    def __init__(
        self, host: ProcessHost, incoming: Any, log_format: str, heartbeat: type[Message] | None = None
    ) -> None:
        """Start the process. `incoming` is the union of the message types that it sends, and `heartbeat` the one that
        it sends regularly once it has started. Raises ProcessNotStartedError, and then leaves nothing behind."""
        self.exited = asyncio.Event()  # set once the process is gone and all its messages are here
        self.was_started = True  # as far as we know
        self.reason: str | None = None  # why it ended, if that is known
        self._inbox: deque[MessageT] = deque()  # bounded by what the process sends before it waits for an Ack
        self._arrived = asyncio.Event()  # the inbox is not empty, or never will be again
        self._loop = asyncio.get_running_loop()
        self._address = host.address
        self._killed = False
        secret = secrets.token_bytes(SECRET_LENGTH)
        self.codec: Codec[MessageT] = Codec(secret, incoming)
        self._connected = self._disconnected = False
        self._heartbeat = heartbeat
        self._has_spoken = self._has_heartbeat = False
        self._num_received = 0
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
            self._process = host.create_process(connection)
            threading.Thread(target=self._run, name="inflight-process", daemon=True).start()
        except (OSError, zmq.ZMQError, RuntimeError) as error:  # RuntimeError: no more threads
            self._context.destroy(linger=0)
            self._remove_folder()
            raise ProcessNotStartedError(f"the {host.name} could not be started: {error}") from error
        self._loop.add_reader(self._up.fileno(), self.read_frames)
        if self._address is not None:
            self._loop.add_reader(self._monitor.fileno(), self._on_connection_event)

    def _open_sockets(self) -> str | None:
        """Open sockets that only this user can reach or, where the system has none, sockets that only the secret
        protects. For a process on another machine open encrypted sockets, and return their public key."""
        self._up = self._context.socket(zmq.PULL)
        self._down = self._context.socket(zmq.PUSH)
        for socket in (self._up, self._down):
            socket.set_hwm(0)  # the process's outbox and the open calls bound what is in flight
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
        """Listen at an address of this machine, for clients with the key that is returned."""
        public, private = zmq.curve_keypair()
        host = f"[{address}]" if ":" in address else address
        for socket in (self._up, self._down):
            socket.ipv6 = ":" in address
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = public, private
            socket.bind(f"tcp://{host}:*")
        return public.decode()

    # ---- in a thread of its own ----

    def _run(self) -> None:
        was_started = True
        try:
            reason = self._process.run()
        except ProcessNotStartedError as error:
            reason, was_started = str(error), False
        except Exception as error:  # a bug in the host must not keep anyone waiting for the end
            logger.exception("a process could not be watched")
            reason, was_started = f"the process could not be watched: {type(error).__name__}: {error}", False
        self._post(lambda: self._end(reason, was_started))

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(callback)

    # ---- in the event loop ----

    def _end(self, reason: str, was_started: bool) -> None:
        self._ending = self._loop.create_task(self._read_and_close(reason, was_started))

    async def _read_and_close(self, reason: str, was_started: bool) -> None:
        """Read the last messages, which may still be in flight: the end of the connection comes after them."""
        self._look_at_connection()
        # A machine that is gone may never close its connection.
        if was_started and not (self._killed and self._address is not None):
            await self._wait(CONNECTION_TIMEOUT, lambda: self._connected)
            if self._connected:
                await self._wait(LAST_MESSAGES_TIMEOUT, lambda: self._disconnected)
        while self.read_frames():
            pass
        self.was_started = was_started
        self.reason = self.reason or reason
        self._close_sockets()
        self.exited.set()
        self._arrived.set()

    async def _wait(self, seconds: float, happened: Callable[[], bool]) -> None:
        """Wait until the connection has changed as expected."""
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

    def _on_connection_event(self) -> None:
        """Notice that a connection was closed although the host reported no end.

        On a network it may be that of another client; then messages of the process continue to arrive.
        """
        was_disconnected = self._disconnected
        self._look_at_connection()
        if self._disconnected and not was_disconnected:
            while self.read_frames():  # sent before the end
                pass
            self._loop.call_later(CUT_TIMEOUT, self._check_still_sending, self._num_received)

    def _check_still_sending(self, num_received: int) -> None:
        if self.exited.is_set():
            return
        if self._num_received == num_received and self._has_heartbeat:
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
        """Messages that have arrived but were not received yet."""
        return self._inbox

    async def receive(self, seconds: float | None = None) -> MessageT | None:
        """Return the next message, or None if none arrives in time (None: no limit) or the process is gone."""
        if not self._inbox and not self.exited.is_set():
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
        return self._inbox.popleft() if self._inbox else None

    def read_frames(self) -> bool:
        """Read the frames that have arrived. Return whether there may be more."""
        for _ in range(MAX_FRAMES):
            try:
                frame = self._up.recv(zmq.NOBLOCK)
            except zmq.ZMQError:  # no more, or handling the last message closed the socket
                return False
            message = self.codec.decode(frame)
            if message is None:
                continue
            if not self._has_spoken:
                # It answers our first message, so it has connected both sockets and their names are no longer needed.
                # Without them nothing is left behind, however this process ends.
                self._has_spoken = True
                self._remove_folder()
            self._num_received += 1
            if self._heartbeat is not None and isinstance(message, self._heartbeat):
                self._has_heartbeat = True
            self._inbox.append(message)
            self._arrived.set()
        self._loop.call_soon(self.read_frames)
        return True

    async def send_first(self, make_message: Callable[[], Message]) -> None:
        """Send the first message, made at that moment, once the process has connected."""
        while not self._down.closed:
            try:
                return self._down.send(self.codec.encode(make_message()), zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(POLL)
        return None

    def send(self, message: Message) -> None:
        self.send_frame(self.codec.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        if not self._down.closed:
            with contextlib.suppress(zmq.Again):  # the other end is gone, which its exit will tell us
                self._down.send(frame, zmq.NOBLOCK)

    def kill(self, reason: str | None = None) -> None:
        """Kill the process without waiting for its end."""
        self.reason = self.reason or reason
        self._killed = True
        self._process.kill()

    async def end(self) -> None:
        """Ask the process to stop, and kill it if it does not. Returns when it is gone."""
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
        """Its id, if it runs on this machine."""
        return self._process.process_id

    @property
    def is_waiting_for_machine(self) -> bool:
        """Whether no machine has resources for it yet."""
        return self._process.is_waiting_for_machine


def _remove_leftovers() -> None:
    """Remove folders of sockets whose owner was killed before its process had connected, and nothing else."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, or not readable for us
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > MAX_FOLDER_AGE:
                leftovers = list(folder.iterdir())
                if {path.name for path in leftovers} <= {"up", "down"} and all(
                    map(Path.is_socket, leftovers)
                ):
                    shutil.rmtree(folder, ignore_errors=True)


def _check_descriptors() -> None:
    """Raise OSError if too few file descriptors are left: libzmq aborts the process when it runs out of them."""
    taken: list[int] = []
    try:
        for _ in range(NUM_DESCRIPTORS):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)
