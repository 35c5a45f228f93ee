"""One plan over several processes, each with its share of the requests and a core of its own.

parent                         child (python -m inflight.bench.crew)
plan ───────────────────────►  reads it, imports what it needs
     ◄─────────────────── ready
start, a moment for all ────►  measures
     ◄──────────────── measured
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import IO

import msgspec

from inflight.bench.serve import LoadPlan, Measured, Progress, measure
from inflight.errors import EngineError

START_DELAY = 0.05  # seconds for all to hear when it starts
READY = b"ready\n"


def measure_with(num_processes: int, plan: LoadPlan, progress: Progress | None = None) -> Measured:
    """Run a plan in this process, or in several of its own."""
    if num_processes == 1:
        return measure(plan, progress=progress)
    plans = split(plan, num_processes)
    try:
        with ExitStack() as stack:
            children = [stack.enter_context(_start()) for _ in plans]
            try:
                return _conduct(children, plans)
            finally:
                for child in children:
                    child.kill()
    except (OSError, EOFError):  # closing a pipe to one that is gone fails as writing to it does
        raise EngineError("a process of the benchmark ended early") from None


def split(plan: LoadPlan, num_processes: int) -> list[LoadPlan]:
    """Every n-th request each, so that all are busy at all times; the limit of requests at once is shared out."""
    limit = plan.concurrency
    count = min(num_processes, len(plan.jobs), limit or num_processes)
    return [
        LoadPlan(
            plan.target,
            plan.jobs[index::count],
            None if limit is None else (limit + count - 1 - index) // count,
            plan.timeout,
        )
        for index in range(count)
    ]


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "inflight.bench.crew"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _conduct(children: list[subprocess.Popen[bytes]], plans: list[LoadPlan]) -> Measured:
    for child, plan in zip(children, plans, strict=True):
        _write(child.stdin, msgspec.msgpack.encode(plan))
    for child in children:
        assert child.stdout is not None
        if child.stdout.readline() != READY:
            raise EOFError
    start = msgspec.msgpack.encode(time.perf_counter() + START_DELAY)
    for child in children:
        _write(child.stdin, start)
    return join([msgspec.msgpack.decode(_read(child.stdout), type=Measured) for child in children])


def join(parts: list[Measured]) -> Measured:
    records = [record for part in parts for record in part.records]
    return Measured(
        sorted(records, key=lambda record: record.index),
        [lag for part in parts for lag in part.loop_lags],
        max(part.cpu_share for part in parts),
    )


def _write(pipe: IO[bytes] | None, message: bytes) -> None:
    assert pipe is not None
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes:
    assert pipe is not None
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError
    return pipe.read(*struct.unpack("<Q", header))


def main() -> None:
    """The child's side."""
    plan = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=LoadPlan)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    start = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=float)
    _write(sys.stdout.buffer, msgspec.msgpack.encode(measure(plan, start)))


if __name__ == "__main__":
    main()
