"""The engine loop: schedule, launch, collect, update."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from inflight.engine.client import (
    MAX_NAMED,
    Command,
    MemoryState,
    RequestState,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from inflight.engine.runner import (
    ExpertCounts,
    NoSleepSupport,
    Runner,
    SleepingRunner,
    SleepSupport,
    asleep,
)
from inflight.engine.stats import STEP_SIZES, EngineStats, ExpertLoads
from inflight.errors import DeviceLostError, EngineError, QueueFullError
from inflight.events import Delta
from inflight.kv.prefix_cache import CacheChanges
from inflight.request import Request, Status
from inflight.scheduling.batch import Batch, Sampled, ScheduledStep
from inflight.scheduling.scheduler import Scheduler
from inflight.timeline.chunks import RecordedTimes, TimelinePage, TimelineQuery
from inflight.timeline.open_runs import StepOutcome
from inflight.timeline.recorder import MAX_BYTES, NoRecorder, Recorder

logger = logging.getLogger(__name__)

T = TypeVar("T")

MARGIN = 0.001  # seconds that a step is launched before the device needs it


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched, and its times."""

    step: ScheduledStep
    handle: Any
    scheduled_at: float
    launched_at: float
    waited: float = 0.0  # seconds for which the device had nothing to do, so that drafts follow known tokens


class EngineCore:
    """One engine: a scheduler, a runner and the batches in flight between them. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Any],
        pipeline_depth: int = 1,
        max_queue: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[], None] = lambda: None,
        prepare: Callable[[Request], Future[Any] | None] = lambda request: None,  # noqa: ARG005
        sleep_support: SleepSupport | None = None,
        expert_counts: ExpertCounts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._sleep_support = sleep_support or NoSleepSupport()
        self.pipeline_depth = pipeline_depth
        self.max_queue = max_queue
        self.clock = clock
        # Raises DeviceLostError if the device is lost. Loops call it while the engine is idle.
        self.check = check
        # Returns a future that a request should wait for before it is added, so that no step of others has to wait.
        self.prepare = prepare
        self._expert_loads = ExpertLoads(expert_counts)
        self._in_flight: deque[LaunchedStep] = deque()
        self._collected_at = -math.inf
        self._step_times = StepTimes()
        # Seconds from scheduling to launch, for the last steps.
        self._leads = deque((0.0,), maxlen=4)
        self._num_left_waiting = 0  # requests that the last scheduled step did not admit
        self._num_prompt_tokens = self._num_output_tokens = self._num_steps = self._num_failed_steps = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._num_step_tokens = 0
        self.recorder: NoRecorder = NoRecorder()

    def record(self, generation: int = 0, max_bytes: int = MAX_BYTES) -> None:
        """Record the timeline from now on. `generation` counts the engines with the same id that there were before."""
        blocks = self.scheduler.blocks
        self.recorder = Recorder(
            self.scheduler.limits, blocks.pool.num_blocks, blocks.block_size, generation, max_bytes
        )

    def stop_recording(self) -> None:
        self.recorder = NoRecorder()

    def _record(self, call: Callable[..., T], *args: Any) -> T | None:
        """Call the recorder. If it fails, turn it off: recording must not break the engine."""
        try:
            return call(*args)
        except Exception:
            logger.exception("recording the timeline failed; timeline recording is now off")
            self.stop_recording()
            return None

    def take_timeline(self) -> bytes | None:
        """Return what viewers have not been sent yet, if it is time to send something."""
        return self._record(self.recorder.take_due, self.clock())

    def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return self._record(self.recorder.page, query) or TimelinePage([], {})

    # ---- requests ----

    def add(self, request: Request) -> None:
        if self.is_sleeping:
            raise asleep()
        self.check_queue_limit()
        request.record.arrived_at = now = self.clock()
        self.scheduler.add(request)
        self._record(self.recorder.arrive, request, now)
        self._num_prompt_tokens += request.num_prompt_tokens

    def check_queue_limit(self, num_pending: int = 0) -> None:
        """Raise QueueFullError if the queue is full, or will be once `num_pending` requests are added.

        Requests that the next step can admit do not count.
        """
        if self.max_queue is None:
            return
        max_queue, pool = self.max_queue, self.scheduler.pool
        num_waiting = pool.num_waiting
        if not num_waiting:
            self._num_left_waiting = 0
        num_waiting += num_pending
        # If the last step left requests waiting, rows are not the bottleneck.
        num_free_rows = 0 if self._num_left_waiting else pool.num_free_rows
        if num_waiting >= max_queue + num_free_rows:
            rows = f", plus {num_free_rows} that can run at once (max_num_seqs)" if num_free_rows else ""
            raise QueueFullError(
                f"the queue is full: {num_waiting} requests are waiting, and max_queue is {max_queue}{rows}; each "
                "completion counts as one"
            )

    def abort(self, request_id: str, reason: str = "abort") -> tuple[int, list[Delta]]:
        """End a request. Return the number of blocks freed and the deltas; (0, []) if there is no such request."""
        pool, now = self.scheduler.pool, self.clock()
        request = pool.requests.get(request_id)
        if request is None:
            return 0, []
        num_freed, deltas = pool.abort(request, now, reason)
        self._record(self.recorder.end, request, reason, pool.take_ended(), now)
        return num_freed, deltas

    def describe(self, request_id: str) -> RequestState | None:
        """Return the state of a request in the engine, or None."""
        pool = self.scheduler.pool
        request = pool.requests.get(request_id)
        if request is None:
            return None
        request.record.num_output_tokens = request.num_output_tokens
        record = replace(request.record, breakdown=pool.attribution.breakdown(request, self.clock()))
        if request.status is not Status.WAITING:
            return RequestState(
                record, "running", request.num_computed, self.scheduler.blocks.num_held(request)
            )
        others = pool.requests.values()
        num_ahead = sum(
            other.status is Status.WAITING and other.arrival < request.arrival for other in others
        )
        running = [other.request_id for other in pool.running]
        return RequestState(
            record,
            "waiting",
            num_ahead=num_ahead,
            waiting_reason=pool.attribution.cause,
            waited_for=tuple(running[-MAX_NAMED:]),
            num_waited_for=len(running),
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.pool.has_work or bool(self._in_flight)

    # ---- the loop ----

    def schedule_delay(self) -> float:
        """Return the seconds by which the next step can be delayed, so that more requests can join it.

        The step on the device is expected to take longer than that.
        """
        if self.pipeline_depth == 1 or len(self._in_flight) != 1 or self.scheduler.limits.num_stages > 1:
            return 0.0
        launched = self._in_flight[0]
        over_at = self._device_began_at(launched) + self._step_times.estimate(launched.step.batch)
        return max(0.0, over_at - max(self._leads) - MARGIN - self.clock())

    def _device_began_at(self, launched: LaunchedStep) -> float:
        """Return when the device began the step: when it was launched or, if later, when the previous one was done."""
        return max(launched.launched_at, self._collected_at)

    def step(self) -> list[Delta]:
        """Launch the next batch, then collect the one that is due; or first collect all, if drafts are to follow what
        they sample.

        An error in a step ends the request that caused it, not the loop, unless the device is lost.
        """
        deltas: list[Delta] = []
        waits = bool(self._in_flight) and self.scheduler.speculation.waits
        while waits and self._in_flight:
            deltas += self._collect()
        scheduled_at = self.clock()
        step = self._schedule()
        if step is not None:
            launched_at = self.clock()
            try:
                handle = self.runner.launch(step.batch)
            except DeviceLostError:
                raise
            except Exception as error:
                return deltas + self._fail(LaunchedStep(step, None, scheduled_at, launched_at), error)
            waited = launched_at - self._collected_at if waits else 0.0
            self._in_flight.append(LaunchedStep(step, handle, scheduled_at, launched_at, waited))
            self._leads.append(self.clock() - scheduled_at)
            if len(self._in_flight) < self.pipeline_depth:
                return deltas
        return deltas if waits or not self._in_flight else self._collect()

    def _schedule(self) -> ScheduledStep | None:
        step = self.scheduler.schedule(self.clock())
        if step is None and not self._in_flight and self.scheduler.pool.has_work:
            raise EngineError(
                f"{self.scheduler.pool.num_waiting} requests are waiting on an idle engine, but none of them fits"
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
        device_began_at = self._device_began_at(launched)
        self._step_times.observe(batch, now - device_began_at)
        self.scheduler.speculation.observe(batch, now - device_began_at, launched.waited)
        self.scheduler.token_budget.observe(
            batch.num_tokens, now - device_began_at, batch.num_prompt_tokens > 0
        )
        self._collected_at = now
        deltas = self.scheduler.update(launched.step, sampled, now)
        self._num_steps += 1
        self._step_sizes[bisect_left(STEP_SIZES, batch.num_tokens)] += 1
        self._num_step_tokens += batch.num_tokens
        outputs = [len(delta.token_ids) for delta in deltas]
        num_outputs = sum(outputs)
        self._num_output_tokens += num_outputs
        pool, updated_at = self.scheduler.pool, self.clock()
        times = RecordedTimes(launched.scheduled_at, launched.launched_at, device_began_at, now, updated_at)
        if self._expert_loads.has_experts and self.recorder.takes_experts:
            self._expert_loads.update(now, not self.has_work)
            self._record(self.recorder.add_experts, batch.step, self._expert_loads.take())
        several = outputs.count(1) < num_outputs
        outcome = StepOutcome(deltas, pool.take_ended(), num_outputs, several, sampled.num_refused(batch))
        self._record_step(launched.step, outcome, times)
        if not self.has_work:
            pool.check_idle()
        return deltas

    def _record_step(self, step: ScheduledStep, outcome: StepOutcome, times: RecordedTimes) -> None:
        self._record(self.recorder.step, step, outcome, self.scheduler.pool, times)

    def _fail(self, launched: LaunchedStep, error: Exception) -> list[Delta]:
        others_in_flight = list(self._in_flight)  # steps in flight with the failed one are void
        self._in_flight.clear()
        step = launched.step
        for other in others_in_flight:
            try:
                self.runner.collect(other.handle)
            except DeviceLostError:
                raise
            except Exception:
                logger.warning("a step in flight with step %d failed, too", step.step)
        message = f"{type(error).__name__} in step {step.step}"
        now = self.clock()
        deltas = self.scheduler.fail(step, message, now)
        logger.error(
            "step %d failed: %d of its %d requests end with an error; any others are retried one at a time",
            step.step,
            sum(delta.error is not None for delta in deltas),
            len(step),
            exc_info=error,
        )
        self._num_failed_steps += 1 + len(others_in_flight)
        ended = self.scheduler.pool.take_ended()
        for other in sorted((launched, *others_in_flight), key=lambda other: other.step.batch.step):
            outcome = StepOutcome(error=message)
            if other is launched:
                outcome = outcome._replace(deltas=deltas, ended=ended)
            device_began_at = self._device_began_at(other)
            times = RecordedTimes(other.scheduled_at, other.launched_at, device_began_at, now, self.clock())
            self._record_step(other.step, outcome, times)
        return deltas

    # ---- statistics ----

    def stats(self) -> EngineStats:
        cache, speculation = self.scheduler.blocks.cache, self.scheduler.speculation.stats
        if not self.is_sleeping:
            self._expert_loads.update(self.clock(), not self.has_work)
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
            num_drafts=speculation.num_drafts,
            num_draft_tokens=speculation.num_drafted,
            num_accepted_tokens=speculation.num_accepted,
            kv=self.scheduler.pool.usage(),
            is_sleeping=self.is_sleeping,
            step_sizes=tuple(self._step_sizes),
            num_step_tokens=self._num_step_tokens,
            experts=self._expert_loads.stats,
        )

    # ---- commands ----

    def run_command(self, command: Command) -> None:
        match command:
            case ResetPrefixCache():
                self.reset_prefix_cache()
            case Sleep():
                self.sleep()
            case WakeUp():
                self.wake_up()

    def read_memory(self) -> MemoryState:
        blocks = self.scheduler.blocks
        refs, empty, evict_next = blocks.pool.state()
        return MemoryState(
            self.clock(),
            blocks.block_size,
            refs.tobytes(),
            empty.tobytes(),
            evict_next,
            blocks.cache.num_queries,
            blocks.cache.num_hits,
            self.scheduler.pool.num_preemptions,
            self.scheduler.pool.usage().groups,
        )

    def watch_cache(self, changes: CacheChanges | None) -> None:
        """Report changes of the prefix cache from now on, beginning with its content; None ends that."""
        self.scheduler.blocks.cache.report(changes)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Running requests keep their blocks."""
        self.scheduler.drop_cache()

    @property
    def is_sleeping(self) -> bool:
        return isinstance(self.runner, SleepingRunner)

    def sleep(self) -> None:
        """Free the KV memory and move the weights to host memory."""
        if self.is_sleeping:
            return
        if self.has_work:
            raise EngineError(
                "the engine has requests: it can sleep only when all have ended", code="engine_busy"
            )
        self._sleep_support.check()
        self.scheduler.drop_cache()
        self.runner.close()
        self.runner = SleepingRunner()
        self._sleep_support.sleep()

    def wake_up(self) -> None:
        if self.is_sleeping:
            self.runner = self._sleep_support.wake()

    def close(self) -> None:
        """Wait for the steps in flight and free the runner's memory."""
        while self._in_flight:
            with suppress(Exception):  # a failed step or a lost device no longer matters
                self.runner.collect(self._in_flight.popleft().handle)
        self.runner.close()


SURE = 0.75  # share of the recent duration of similar steps to rely on: contexts and load vary


class StepTimes:
    """Estimates the duration of a step from recent ones of about the same size."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], tuple[float, float]] = {}  # the last two by size class

    def observe(self, batch: Batch, seconds: float) -> None:
        size = _size(batch)
        self._seconds[size] = seconds, self._seconds.get(size, (seconds,))[0]

    def estimate(self, batch: Batch) -> float:
        """Return a duration that the step will likely exceed, or 0 if no similar step was observed."""
        return SURE * min(self._seconds.get(_size(batch), (0.0,)))


def _size(batch: Batch) -> tuple[bool, int]:
    """Return the size class: whether the batch has prompts, and its tokens to within about a third."""
    tokens = batch.num_tokens
    octave = tokens.bit_length()
    return batch.num_prompt_tokens > 0, 2 * octave + (tokens >> max(octave - 2, 0) & 1)
