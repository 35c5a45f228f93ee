"""Threads that several owners share fairly."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from inflight.errors import QueueFullError

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _QueuedCall:
    owner: str
    work: Callable[[], Any]
    after: Callable[[], None] | None
    future: Future[Any] = field(default_factory=Future)


class FairThreads:
    """Runs jobs in a few threads, at most `max_per_owner` of one owner at a time.

    Owners take turns, so an owner with many jobs delays another by one job at most, and not at all while fewer than
    `num_threads // max_per_owner` other owners are busy.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_per_owner: int = 1,
        max_waiting: int | None = None,
        full_message: str = "{} jobs of this tenant are waiting, which is the limit: try again later",
    ) -> None:
        """Limit the waiting jobs of each owner to `max_waiting`; `full_message` says so, with {} for their number."""
        self._full_message = full_message
        self._num_threads = num_threads
        self._max_per_owner = max_per_owner
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        # By owner, in the order of their turns; no deque is empty.
        self._waiting: dict[str, deque[_QueuedCall]] = {}
        self._running: Counter[str] = Counter()  # jobs by owner

    def submit(self, owner: str, work: Callable[[], T], after: Callable[[], None] | None = None) -> Future[T]:
        """Run `work` in a thread, then `after`, which the future does not wait for but which still occupies the thread.

        Cancelling the future removes the job from the queue. Raises QueueFullError.
        """
        job = _QueuedCall(owner, work, after)
        with self._lock:
            num_waiting = len(self._waiting.get(owner, ()))
            if self._max_waiting is not None and num_waiting >= self._max_waiting:
                raise QueueFullError(self._full_message.format(num_waiting))
            self._waiting.setdefault(owner, deque()).append(job)
            self._start_jobs()
        job.future.add_done_callback(lambda future: self._withdraw(job) if future.cancelled() else None)
        return job.future

    def close(self) -> None:
        """Cancel the waiting jobs and let the running ones finish, without waiting for them."""
        with self._lock:
            waiting = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for job in waiting:
            job.future.cancel()
        self._threads.shutdown(wait=False)

    def _start_jobs(self) -> None:
        """Start jobs while threads are free. The caller holds the lock."""
        while self._running.total() < self._num_threads:
            job = self._next_job()
            if job is None:
                return
            if job.future.set_running_or_notify_cancel():
                self._running[job.owner] += 1
                self._threads.submit(self._run, job)

    def _next_job(self) -> _QueuedCall | None:
        for owner, jobs in self._waiting.items():
            if self._running[owner] < self._max_per_owner:
                del self._waiting[owner]
                job = jobs.popleft()
                if jobs:
                    self._waiting[owner] = jobs  # behind all other owners
                return job
        return None

    def _run(self, job: _QueuedCall) -> None:
        try:
            try:
                job.future.set_result(job.work())
            except BaseException as error:
                job.future.set_exception(error)
            if job.after is not None:
                job.after()
        finally:
            with self._lock:
                self._running[job.owner] -= 1
                self._running += Counter()  # drop owners without jobs
                self._start_jobs()

    def _withdraw(self, job: _QueuedCall) -> None:
        """Remove a cancelled job from the queue if it is still there."""
        with self._lock:
            jobs = self._waiting.get(job.owner)
            if jobs is None or job not in jobs:
                return
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.owner]
