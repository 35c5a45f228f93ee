"""The loop: schedule, launch, collect, update."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from inflight.engine.runner import Runner
from inflight.engine.sleep import Command, NoSleepSupport, SleepingRunner, SleepSupport, asleep
from inflight.engine.step_records import LaunchedStep, StepRecords
from inflight.errors import DeviceLostError, EngineError, QueueFullError
from inflight.events import Delta, KVUsage
from inflight.request import Request
from inflight.scheduling import Batch, Sampled, ScheduledStep, Scheduler

logger = logging.getLogger(__name__)

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MARGIN = 0.001  # seconds by which a step is launched before the device needs it


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, and its totals so far."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_failed_steps: int  # not among num_steps
    num_prefix_queries: int  # tokens
    num_prefix_hits: int  # tokens
    kv: KVUsage
    is_sleeping: bool = False
    # Steps by the tokens that they computed: how many were no larger than each of STEP_SIZES, then those beyond.
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)
    num_step_tokens: int = 0  # of these steps together


class EngineCore:
    """One engine: a scheduler, a runner and the batches in flight between them. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Any],
        pipeline_depth: int = 1,
        max_queue: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        engine_id: str = "0",
        check: Callable[[], None] = lambda: None,
        prepare: Callable[[Request], Future[Any] | None] = lambda request: None,  # noqa: ARG005
        sleep_support: SleepSupport | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._sleep_support = sleep_support or NoSleepSupport()
        self.pipeline_depth = pipeline_depth
        self.max_queue = max_queue
        self.clock = clock
        # Raises DeviceLostError if no step could be run any more. For loops to ask while there is nothing to do.
        self.check = check
        # What a request should wait for before it is added, since steps would: others are in them.
        self.prepare = prepare
        self._records = StepRecords(engine_id)
        self.observers = self._records.observers
        self._in_flight: deque[LaunchedStep] = deque()
        self._collected_at = -math.inf
        self._step_times = StepTimes()
        # Seconds that the last steps took from being scheduled to being launched.
        self._leads = deque((0.0,), maxlen=4)
        self._num_left_waiting = 0  # by the last step that was scheduled
        self._num_prompt_tokens = self._num_output_tokens = self._num_steps = self._num_failed_steps = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._num_step_tokens = 0

    # ---- requests ----

    def add(self, request: Request) -> None:
        if self.is_sleeping:
            raise asleep()
        self.check_place()
        request.record.arrived_at = now = self.clock()
        self.scheduler.add(request)
        self._records.arrival(request.request_id, now)
        self._num_prompt_tokens += request.num_prompt_tokens

    def check_place(self, num_coming: int = 0) -> None:
        """Raise QueueFullError if the queue is full, or will be once `num_coming` requests are added. Whoever the next
        step can take in needs no place in it."""
        if self.max_queue is None:
            return
        max_queue, pool = self.max_queue, self.scheduler.pool
        num_waiting = pool.num_waiting
        if not num_waiting:
            self._num_left_waiting = 0
        num_waiting += num_coming
        # If a step left anyone waiting, it is not rows that are wanting.
        num_free_rows = 0 if self._num_left_waiting else pool.num_free_rows
        if num_waiting >= max_queue + num_free_rows:
            rows = f", beside {num_free_rows} that can run at once (max_num_seqs)" if num_free_rows else ""
            raise QueueFullError(
                f"{num_waiting} requests are waiting: the queue has {max_queue} places (max_queue){rows}, and "
                "every answer takes one"
            )

    def abort(self, request_id: str, reason: str = "abort") -> tuple[int, list[Delta]]:
        """End a request. The number of blocks freed, and its last delta; (0, []) if there is no such request."""
        pool, now = self.scheduler.pool, self.clock()
        request = pool.requests.get(request_id)
        if request is None:
            return 0, []
        found = pool.abort(request, now, reason)
        self._records.abort(request_id, reason, pool, now)
        return found

    @property
    def has_work(self) -> bool:
        return self.scheduler.pool.has_work or bool(self._in_flight)

    # ---- the loop ----

    def schedule_delay(self) -> float:
        """Seconds that the next step may be put off, for requests that come meanwhile to be part of it: the one on
        the device will not be over before."""
        if self.pipeline_depth == 1 or len(self._in_flight) != 1 or self.scheduler.limits.num_stages > 1:
            return 0.0
        launched = self._in_flight[0]
        over_at = self._began_at(launched) + self._step_times.estimate(launched.step.batch)
        return max(0.0, over_at - max(self._leads) - MARGIN - self.clock())

    def _began_at(self, launched: LaunchedStep) -> float:
        """A step begins when it is launched or, if that is later, when the step before it is done."""
        return max(launched.started_at, self._collected_at)

    def step(self) -> list[Delta]:
        """Launch the next batch, then collect the one that is due. An error of a step ends the request that caused
        it, not the loop, unless there is nothing left to run it on."""
        scheduled_at = self.clock()
        step = self._schedule()
        if step is not None:
            started_at = self.clock()
            try:
                handle = self.runner.launch(step.batch)
            except DeviceLostError:
                raise
            except Exception as error:
                return self._fail(LaunchedStep(step, None, scheduled_at, started_at), error)
            self._in_flight.append(LaunchedStep(step, handle, scheduled_at, started_at))
            self._leads.append(self.clock() - scheduled_at)
            if len(self._in_flight) < self.pipeline_depth:
                return []
        return self._collect() if self._in_flight else []

    def _schedule(self) -> ScheduledStep | None:
        step = self.scheduler.schedule(self.clock())
        if step is None and not self._in_flight and self.scheduler.pool.has_work:
            # A step that only preempts computes nothing: the next one must.
            step = self.scheduler.schedule(self.clock())
            if step is None:
                raise EngineError(
                    f"{self.scheduler.pool.num_waiting} requests wait in an empty engine, but none of them fits"
                )
        self._num_left_waiting = self.scheduler.pool.num_waiting
        return step

    def _collect(self) -> list[Delta]:
        launched = self._in_flight.popleft()
        try:
            sampled: Sampled = self.runner.collect(launched.handle)
        except DeviceLostError:
            raise
        except Exception as error:
            return self._fail(launched, error)
        now, batch = self.clock(), launched.step.batch
        began_at = self._began_at(launched)
        self._step_times.observe(batch, now - began_at)
        self.scheduler.token_budget.observe(batch.num_tokens, now - began_at, batch.num_tokens > len(batch))
        self._collected_at = now
        deltas = self.scheduler.update(launched.step, sampled, now)
        self._num_steps += 1
        self._step_sizes[bisect_left(STEP_SIZES, batch.num_tokens)] += 1
        self._num_step_tokens += batch.num_tokens
        self._num_output_tokens += sum(len(delta.token_ids) for delta in deltas)
        if self.observers:
            self._records.step(launched, deltas, self.scheduler.pool, began_at, now, self.clock())
        if not self.has_work:
            self.scheduler.pool.check_idle()
        return deltas

    def _fail(self, launched: LaunchedStep, error: Exception) -> list[Delta]:
        beside = list(self._in_flight)  # what was launched around the failed step is void
        self._in_flight.clear()
        step = launched.step
        for other in beside:
            try:
                self.runner.collect(other.handle)
            except DeviceLostError:
                raise
            except Exception:
                logger.warning("a step in flight beside step %d failed too", step.step)
        message = f"{type(error).__name__} in step {step.step}"
        now = self.clock()
        deltas = self.scheduler.fail(step, message, now)
        logger.error(
            "step %d failed: %d of its %d requests end with the error, any others are tried alone",
            step.step,
            sum(delta.error is not None for delta in deltas),
            len(step),
            exc_info=error,
        )
        self._num_failed_steps += 1 + len(beside)
        if self.observers:
            for other in sorted((launched, *beside), key=lambda other: other.step.step):
                news = deltas if other is launched else ()
                began_at = self._began_at(other)
                self._records.step(other, news, self.scheduler.pool, began_at, now, self.clock(), message)
        return deltas

    # ---- what it shows ----

    def stats(self) -> EngineStats:
        cache = self.scheduler.blocks.cache
        return EngineStats(
            num_running=len(self.scheduler.pool.running),
            num_waiting=self.scheduler.pool.num_waiting,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self.scheduler.pool.num_preemptions,
            num_failed_steps=self._num_failed_steps,
            num_prefix_queries=cache.num_queries,
            num_prefix_hits=cache.num_hits,
            kv=self.scheduler.pool.usage(),
            is_sleeping=self.is_sleeping,
            step_sizes=tuple(self._step_sizes),
            num_step_tokens=self._num_step_tokens,
        )

    # ---- what it can be told beside requests ----

    def obey(self, command: Command) -> None:
        {"reset_prefix_cache": self.reset_prefix_cache, "sleep": self.sleep, "wake_up": self.wake_up}[
            command
        ]()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Those that run keep their blocks."""
        self.scheduler.blocks.drop_cache()

    @property
    def is_sleeping(self) -> bool:
        return isinstance(self.runner, SleepingRunner)

    def sleep(self) -> None:
        """Give up the KV memory and what is in it, and put the weights into host memory."""
        if self.is_sleeping:
            return
        if self.has_work:
            raise EngineError(
                "the engine has requests: it can sleep when they have ended", code="engine_busy"
            )
        self._sleep_support.check()
        self.scheduler.blocks.drop_cache()
        self.runner.close()
        self.runner = SleepingRunner()
        self._sleep_support.sleep()

    def wake_up(self) -> None:
        if self.is_sleeping:
            self.runner = self._sleep_support.wake()

    def close(self) -> None:
        """Wait for what is in flight and give back the runner's memory."""
        while self._in_flight:
            with suppress(Exception):  # a step that failed, or a device that is lost: nobody asks any more
                self.runner.collect(self._in_flight.popleft().handle)
        self.runner.close()


SURE = 0.75  # of the time that steps of this size took lately: contexts and the machine's load differ


class StepTimes:
    """Learns from the steps themselves. Sizes that lie close together are one."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], tuple[float, float]] = {}  # the last two of each size

    def observe(self, batch: Batch, seconds: float) -> None:
        size = _size(batch)
        self._seconds[size] = seconds, self._seconds.get(size, (seconds,))[0]

    def estimate(self, batch: Batch) -> float:
        """0 for a size that was not seen yet."""
        return SURE * min(self._seconds.get(_size(batch), (0.0,)))


def _size(batch: Batch) -> tuple[bool, int]:
    """Whether prompts are in it, and its tokens to about a third."""
    tokens = batch.num_tokens
    octave = tokens.bit_length()
    return tokens > len(batch), 2 * octave + (tokens >> max(octave - 2, 0) & 1)
