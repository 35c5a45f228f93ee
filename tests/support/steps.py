"""What the steps of an engine did, step by step, for tests that look at them while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from inflight.engine.core import EngineCore
from inflight.events import KVUsage, Preemption
from inflight.scheduling.batch import ScheduledStep
from inflight.timeline.chunks import RecordedTimes
from inflight.timeline.open_runs import StepOutcome


class SlotRecord(NamedTuple):
    """The work of one row in one step: tokens [start, start + num_tokens) of a request."""

    row: int
    request_id: str
    start: int
    num_tokens: int
    samples: bool  # the step produced a token here
    decodes: bool  # the one token computed was itself an output


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine."""

    step: int
    times: RecordedTimes
    slots: tuple[SlotRecord, ...]
    admitted_ids: tuple[str, ...]
    preempted: tuple[Preemption, ...]  # since the step before
    finished_ids: tuple[str, ...]
    idle_rows: tuple[int, ...]  # rows of finished requests that the policy keeps
    num_running: int
    num_waiting: int
    kv: KVUsage
    error: str | None = None  # the step failed or was in flight with one that did: it is void

    @property
    def finished_at(self) -> float:
        return self.times.finished_at


StepObserver = Callable[[StepRecord], None]


def observe(core: EngineCore, observer: StepObserver) -> Callable[[], None]:
    """Call `observer` after every step, in the engine's thread. Return a function that ends it."""
    record_step, pool = core._record_step, core.scheduler.pool
    is_over = False

    def observed(step: ScheduledStep, outcome: StepOutcome, times: RecordedTimes) -> None:
        record_step(step, outcome, times)
        if is_over:
            return
        batch = step.batch
        slots = tuple(
            SlotRecord(row, request.request_id, start, count, samples, start >= request.num_prompt_tokens)
            for request, row, start, count, samples in zip(
                step.requests, batch.rows, batch.starts, batch.counts, batch.samples, strict=True
            )
        )
        record = StepRecord(
            batch.step,
            times,
            slots,
            tuple(admission.request.request_id for admission in batch.admissions),
            tuple(step.preempted),
            tuple(delta.request_id for delta in outcome.deltas if delta.finish_reason),
            tuple(request.row for request in pool.lingering),
            len(pool.running),
            pool.num_waiting,
            step.kv,
            outcome.error,
        )
        observer(record)

    def stop() -> None:
        nonlocal is_over
        is_over = True

    core._record_step = observed  # type: ignore[method-assign]
    return stop
