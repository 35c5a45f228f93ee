"""The speed of quantized linear layers and experts, and the best of a few tiles: `benchmarks.kernels --quantized`.

Products are computed in their own processes, so that one that fails costs nothing else. In the first half of the
time, many processes compile all kernels at once, run each of them and check its result. Then one process measures them
one by one; kernels that failed before are left out.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.device_timing import Ceilings, measure_ceilings, seconds_of
from benchmarks.quantized_cases import LARGEST_ERROR, Product, make_problem
from benchmarks.report import Progress, show

SILENCE = 120.0  # seconds after which a process is given up
_CHOSEN, _LIMIT, _PROBLEM = "chosen", "limit", "problem"  # names of messages beside those of kernels

Message = tuple[str, float | str | None]  # the name of a kernel, and its seconds, or what went wrong


@dataclass(frozen=True, slots=True)
class Task:
    product: Product
    measured: bool  # or only compiled and checked
    tune: bool
    left_out: frozenset[str] = frozenset()  # names of kernels


@dataclass(slots=True)
class Result:
    """What is known of a product."""

    seconds: dict[str, float] = field(default_factory=dict)  # by the name of the kernel
    failures: dict[str, str] = field(default_factory=dict)
    chosen: str | None = None  # by `tuning.py`
    limit: float | None = None

    def add(self, name: str, outcome: float | str | None) -> None:
        if name == _CHOSEN:
            self.chosen = outcome if isinstance(outcome, str) else None
        elif isinstance(outcome, str):
            self.failures[name] = outcome
        elif name == _LIMIT:
            self.limit = outcome
        elif outcome is not None:
            self.seconds[name] = outcome

    @property
    def best(self) -> str | None:
        """The name of the fastest kernel of ours."""
        own = {name: time for name, time in self.seconds.items() if name not in ("bf16", "library")}
        return min(own, key=lambda name: own[name]) if own else None


# ---- in its own process ----


def perform(task: Task, device: torch.device) -> Iterator[Message]:
    """Yield what becomes of each kernel: an error, or the seconds it takes if it is measured."""
    problem = make_problem(task.product, device, task.tune, copied=task.measured)
    if problem.candidates:
        yield _CHOSEN, str(problem.candidates[0])
    for candidate in problem.candidates:
        name = str(candidate)
        if name in task.left_out:
            continue
        if task.measured:
            yield name, _attempt(device, lambda own: seconds_of(problem.calls(own), device), candidate)
        else:
            error = _attempt(device, problem.error, candidate)
            if isinstance(error, float) and not error <= LARGEST_ERROR:
                error = f"wrong result: relative error {error:.3g}"
            yield name, error if isinstance(error, str) else None
    if task.measured:
        for name, calls in problem.others():
            yield name, _attempt(device, seconds_of, calls, device)
        yield _LIMIT, problem.limit(_ceilings(device))


def _attempt(device: torch.device, call: Callable[..., float], *arguments: Any) -> float | str:
    """Return the result, or what went wrong."""
    try:
        result = call(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@functools.cache
def _ceilings(device: torch.device) -> Ceilings:
    ceilings = measure_ceilings(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _serve(connection: Connection, device_name: str) -> None:
    """Perform tasks until there are no more. After each, send None."""
    device = torch.device(device_name)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            for name, outcome in perform(task, device):
                connection.send((name, outcome))
                if isinstance(outcome, str) and name != _CHOSEN:
                    _exit_if_lost(device)
        except Exception as error:
            connection.send((_PROBLEM, f"{type(error).__name__}: {error}"[:200]))
            _exit_if_lost(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        connection.send(None)


def _exit_if_lost(device: torch.device) -> None:
    """End the process if a kernel has broken its connection to the device."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        os._exit(1)


# ---- in the main process ----


class Worker:
    def __init__(self, device_name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device_name), daemon=True)
        self._process.start()
        theirs.close()
        self.heard = time.monotonic()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def run_tasks(
    tasks: list[Task],
    num_workers: int,
    device_name: str,
    deadline: float,
    report: Callable[[Product, str, float | str | None], None],
    finished: Callable[[Product], None],
) -> None:
    """Perform tasks until time.monotonic() is `deadline`. A process that dies or says nothing is replaced, and its task
    is left as it is."""
    waiting, idle = deque(tasks), list[Worker]()
    busy: dict[Connection, tuple[Worker, Task]] = {}
    try:
        while (waiting or busy) and time.monotonic() < deadline:
            while waiting and len(busy) < num_workers:
                worker = idle.pop() if idle else Worker(device_name)
                task = waiting.popleft()
                worker.connection.send(task)
                worker.heard = time.monotonic()
                busy[worker.connection] = worker, task
            ready = wait(list(busy), timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            for connection, (worker, task) in list(busy.items()):
                if connection not in ready and time.monotonic() - worker.heard < SILENCE:
                    continue
                try:
                    message = connection.recv() if connection in ready else (_PROBLEM, "no answer")
                except (EOFError, OSError):
                    message = _PROBLEM, "the process died"
                worker.heard = time.monotonic()
                if message is None:
                    del busy[connection]
                    idle.append(worker)
                    finished(task.product)
                    continue
                report(task.product, *message)
                if message in ((_PROBLEM, "no answer"), (_PROBLEM, "the process died")):
                    del busy[connection]
                    worker.stop()
                    finished(task.product)
    finally:
        for worker in (*idle, *(worker for worker, _ in busy.values())):
            worker.stop()


def measure_quantized(
    products: list[Product], device_name: str, tune: bool, seconds: float, processes: int, as_json: bool
) -> None:
    """Measure the products and print the best kernel of each. What is known is printed when the time is up."""
    start, progress = time.monotonic(), Progress(seconds)
    results = {product: Result() for product in products}
    compiled: list[Product] = []
    tasks = [Task(product, False, tune) for product in products]
    progress.tell(f"compiling the kernels of {len(products)} products in {processes} processes")
    run_tasks(
        tasks,
        processes,
        device_name,
        start + seconds / 2,
        lambda product, *message: results[product].add(*message),
        compiled.append,
    )
    progress.tell(f"compiled {len(compiled)} of {len(products)}; measuring")

    def tell(product: Product) -> None:
        progress.tell(" | ".join(map(str, _row(product, results[product]))))

    # What is not compiled yet comes last.
    order = sorted(products, key=lambda product: product not in compiled)
    tasks = [Task(product, True, tune, frozenset(results[product].failures)) for product in order]
    run_tasks(
        tasks,
        1,
        device_name,
        start + seconds,
        lambda product, *message: results[product].add(*message),
        tell,
    )
    known = {product: result for product, result in results.items() if result.seconds or result.failures}
    columns = ["product", "best kernel", "us", "of limit", "tuning.py us", "library us", "bf16 us"]
    show(
        f"{len(known)} of {len(products)} products",
        columns,
        [_row(product, result) for product, result in known.items()],
        as_json,
        {"results": [dict(zip(columns, _row(*pair), strict=True)) for pair in known.items()]},
    )
    for product, result in known.items():
        for name, failure in result.failures.items():
            progress.tell(f"failed: {product}, {name}: {failure}")


def _row(product: Product, result: Result) -> list[str]:
    best = result.best
    time = None if best is None else result.seconds[best]
    share = "" if time is None or result.limit is None else f"{result.limit / time:.0%}"
    others = (result.seconds.get(name) for name in (result.chosen or "", "library", "bf16"))
    return [str(product), best or "", _microseconds(time), share, *map(_microseconds, others)]


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
