"""Owners share threads fairly, and their queues are bounded."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack

import pytest

from inflight.errors import QueueFullError
from inflight.processes.fair_threads import FairThreads

SECONDS = 30.0


class Gate:
    """Jobs that wait until the gate opens. It opens at the end of the test at the latest."""

    def __init__(self, stack: ExitStack) -> None:
        self.order: list[str] = []  # owners of the jobs that ran
        self._open = threading.Event()
        stack.callback(self._open.set)

    def held(self, threads: FairThreads, owner: str) -> Future[None]:
        """Submit a job that ends when the gate is opened, and wait until it runs."""
        begun = threading.Event()

        def work() -> None:
            begun.set()
            self._open.wait(SECONDS)

        future = threads.submit(owner, work)
        assert begun.wait(SECONDS)
        return future

    def noted(self, threads: FairThreads, owner: str) -> Future[None]:
        return threads.submit(owner, lambda: self.order.append(owner))

    def open(self) -> None:
        self._open.set()


def test_owner_with_many_jobs_leaves_a_thread_to_others() -> None:
    threads = FairThreads("test", num_threads=2)
    with ExitStack() as stack:
        gate = Gate(stack)
        held = gate.held(threads, "a")
        waiting = [gate.noted(threads, "a") for _ in range(20)]
        gate.noted(threads, "b").result(SECONDS)
        assert not held.done()
        assert not any(future.done() for future in waiting)


def test_owners_take_turns() -> None:
    threads = FairThreads("test", num_threads=1)
    with ExitStack() as stack:
        gate = Gate(stack)
        gate.held(threads, "a")
        jobs = [gate.noted(threads, owner) for owner in "aaabbc"]
        gate.open()
        for job in jobs:
            job.result(SECONDS)
        assert gate.order == ["a", "b", "c", "a", "b", "a"]


def test_waiting_jobs_of_an_owner_are_limited_and_cancelled_ones_do_not_count() -> None:
    threads = FairThreads("test", num_threads=1, max_waiting=2, full_message="{} jobs already")
    with ExitStack() as stack:
        gate = Gate(stack)
        gate.held(threads, "a")
        first, second = gate.noted(threads, "a"), gate.noted(threads, "a")
        with pytest.raises(QueueFullError, match="2 jobs already"):
            gate.noted(threads, "a")
        other = gate.noted(threads, "b")
        assert first.cancel()
        third = gate.noted(threads, "a")
        gate.open()
        for job in (second, third, other):
            job.result(SECONDS)
        with pytest.raises(CancelledError):
            first.result(SECONDS)
        assert sorted(gate.order) == ["a", "a", "b"]


def test_clean_up_delays_the_next_job_but_not_the_result() -> None:
    threads = FairThreads("test", num_threads=2)
    clean_up, next_begun = threading.Event(), threading.Event()

    def after() -> None:
        clean_up.wait(SECONDS)

    assert threads.submit("a", lambda: 1, after).result(SECONDS) == 1
    later = threads.submit("a", next_begun.set)
    threads.submit("b", lambda: None).result(SECONDS)
    assert not next_begun.is_set()
    clean_up.set()
    later.result(SECONDS)


def test_job_that_raises_frees_its_thread() -> None:
    threads = FairThreads("test", num_threads=1)

    def fail() -> None:
        raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="broken on purpose"):
        threads.submit("a", fail).result(SECONDS)
    assert threads.submit("a", lambda: 2).result(SECONDS) == 2
