"""Child processes: the parent starts, watches and kills them; a child reads its first line and ends with its parent.

A child reads one line of JSON from its standard input. That stays open, so that its end tells the child that the
parent is gone. The thread that starts a child must live as long as the child does, because for the kernel that thread
is the parent. So `run` starts a child and waits for its end in one call.

`ProcessHost` is the seam between the users of a process and the machine on which it runs: `ChildHost` runs it as a
child of this process, `RayHost` (`router/ray_cluster/host.py`) as an actor on a machine that Ray chooses.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import msgspec

from inflight.errors import EngineDeadError
from inflight.processes.channel import ConnectionInfo


class ProcessNotStartedError(EngineDeadError):
    """The system lacked what a process needs: a file descriptor, a folder, memory, a machine. That may pass."""


class HostedProcess(Protocol):
    """A process that runs, or that is about to be started."""

    @property
    def process_id(self) -> int | None:
        """None if it is not started yet, or runs on another machine."""

    @property
    def is_waiting_for_machine(self) -> bool:
        """Whether it is not started yet because no machine has resources for it."""

    def run(self) -> str:
        """Start it, wait for its end, and return how it ended. Raises ProcessNotStartedError."""

    def kill(self) -> None:
        """Kill it, or keep it from being started. Does not wait."""


class ProcessHost(Protocol):
    @property
    def name(self) -> str:
        """A name for log lines and errors."""

    @property
    def address(self) -> str | None:
        """This machine's address as its processes reach it, or None if they run on this machine."""

    def create_process(self, connection: ConnectionInfo) -> HostedProcess:
        """Return a process that is not started yet."""


@dataclass(frozen=True, slots=True)
class ChildHost:
    """Implements `ProcessHost` with children of this process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to this process's environment
    descriptors: Collection[int] = ()  # file descriptors to inherit

    @property
    def address(self) -> None:
        return None

    def create_process(self, connection: ConnectionInfo) -> ChildProcess:
        return ChildProcess(self, connection)


class ChildProcess:
    """A child that is given `start` as its first line. It ends with this process, however this one ends.

    Implements `HostedProcess`.
    """

    def __init__(self, host: ChildHost, start: msgspec.Struct) -> None:
        self._host = host
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_waiting_for_machine(self) -> bool:
        return False

    def run(self) -> str:
        try:
            return f"the {self._host.name} ended {self.run_and_follow(lambda: None)}"
        except OSError as error:
            raise ProcessNotStartedError(f"the {self._host.name} could not be started: {error}") from error

    def run_and_follow(self, follow: Callable[[], None]) -> str:
        """Start the child, call `follow`, wait for the child's end and return its exit code or signal."""
        spare = _take_spare(self._host)
        process = self._process = _start(self._host) if spare is None else spare.process.result()
        if self._killed:  # before it was started
            process.kill()
        if spare is not None:
            return spare.hand_over(self._start)
        _send_line(process, self._start)
        follow()
        return _wait_for_end(process)

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()


class SpareProcess:
    """A child that is started before it is needed. It gets its first line when a `ChildProcess` takes it over."""

    def __init__(self, host: ChildHost, *arguments: str) -> None:
        self.host = host
        self.process: Future[subprocess.Popen[bytes]] = Future()
        self._arguments = arguments
        self._start: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()
        self._end: Future[str] = Future()
        threading.Thread(target=self._run, name="inflight-spare", daemon=True).start()

    def _run(self) -> None:
        try:
            process = _start(self.host, *self._arguments)
        except OSError as error:
            self.process.set_exception(error)
            return
        self.process.set_result(process)
        _send_line(process, self._start.get())
        self._end.set_result(_wait_for_end(process))

    def hand_over(self, start: msgspec.Struct) -> str:
        """Send the first line, wait for the child's end and return how it ended."""
        self._start.put(start)
        return self._end.result()


_spares: list[SpareProcess] = []  # at most one


def start_spare(host: ChildHost, *arguments: str) -> None:
    """Start a spare for the first `ChildProcess` with the same command and environment. It ends with this process.

    `arguments` are added to the command.
    """
    _spares[:] = [SpareProcess(host, *arguments)]


def _take_spare(host: ChildHost) -> SpareProcess | None:
    """Return the spare, once, if it is what this host would start."""
    if host.descriptors or not _spares:
        return None
    spare = _spares[0].host
    if host.command != spare.command or dict(host.environment) != dict(spare.environment):
        return None
    with contextlib.suppress(IndexError):  # another thread was faster
        return _spares.pop()
    return None


def _start(host: ChildHost, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*host.command, *arguments],
        stdin=subprocess.PIPE,
        stdout=2,  # what it prints is not output of this process
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **host.environment,
        },
        start_new_session=True,  # Ctrl-C is for the parent
        pass_fds=tuple(host.descriptors),
    )


def _send_line(process: subprocess.Popen[bytes], start: msgspec.Struct) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has exited already
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()  # not closed: the child watches it


def _wait_for_end(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with code {code}"


# ---- the child's side ----

# Bytes read or written that count as progress: far more than the heartbeats of a hanging process need.
MOVED_BYTES = 1 << 20


class StartLine(Protocol):
    """The first line of every child."""

    @property
    def parent_id(self) -> int: ...


StartT = TypeVar("StartT", bound=StartLine)


def run_child(
    start_type: type[StartT], work: Callable[[StartT], int], while_waiting: Callable[[], None] = lambda: None
) -> NoReturn:
    """Read the first line as a `start_type`, do the `work`, and exit with the code that it returns.

    The parent decides when the child ends, so signals for the parent's terminal or service manager are ignored, and the
    child exits when the parent does. `while_waiting` is called before the line is read.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while_waiting()
    code = 0
    line = sys.stdin.buffer.readline()
    if line:  # otherwise the parent ended, or changed its mind, before it sent one
        start = msgspec.json.decode(line, type=start_type)
        _exit_with(start.parent_id)
        code = work(start)
    logging.shutdown()
    os._exit(code)  # the kernel frees memory faster than the libraries do


def _exit_with(parent_id: int) -> None:
    """Exit when the parent does, even in the middle of a step."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:
        os._exit(1)
    pipe = os.dup(0)  # the parent holds the other end for as long as it lives
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="inflight-parent-watch", daemon=True).start()


@contextlib.contextmanager
def reporting_input(report: Callable[[], None], interval: float = 1.0) -> Iterator[None]:
    """Call `report` from a thread whenever this process has read or written another megabyte.

    A start that downloads weights, or reads a large tensor from a slow disk, makes progress before the next tensor is
    complete. CPU time is not progress: a process that waits for a device or another rank may spin.
    """
    is_over = threading.Event()

    def watch() -> None:
        seen = _bytes_moved()
        while not is_over.wait(interval):
            moved = _bytes_moved()
            if moved - seen >= MOVED_BYTES:
                seen = moved
                report()

    thread = threading.Thread(target=watch, name="inflight-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written, including mapped files; 0 if that is unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
