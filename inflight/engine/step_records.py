"""Records for observers: one per step, with the arrivals and aborts since the previous one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inflight.events import AbortRecord, ArrivalRecord, Delta, SlotRecord, StepRecord
from inflight.scheduling import RequestPool, ScheduledStep

logger = logging.getLogger(__name__)

NO_STEP = -1  # the number of a record that describes no step

StepObserver = Callable[[StepRecord], None]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched, and its times."""

    step: ScheduledStep
    handle: Any
    scheduled_at: float
    started_at: float


class StepRecords:
    """Builds step records and passes them to observers. It does no work while there are none."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.observers: list[StepObserver] = []
        self._arrived: list[ArrivalRecord] = []
        self._aborted: list[AbortRecord] = []

    def arrival(self, request_id: str, now: float) -> None:
        if self.observers:
            self._arrived.append(ArrivalRecord(request_id, now))

    def abort(self, request_id: str, reason: str, pool: RequestPool, now: float) -> None:
        """Record an abort. If no work is left, no step will report it, so emit a record without a step."""
        if self.observers:
            self._aborted.append(AbortRecord(request_id, now, reason))
            if not pool.has_work:
                self._emit(StepRecord(NO_STEP, now, now, (), (), (), (), (), 0, 0, pool.usage()))

    def step(
        self,
        launched: LaunchedStep,
        deltas: Sequence[Delta],
        pool: RequestPool,
        began_at: float,
        finished_at: float,
        updated_at: float,
        error: str | None = None,
    ) -> None:
        step, batch = launched.step, launched.step.batch
        slots = tuple(
            SlotRecord(row, request.request_id, start, count, samples, start >= request.num_prompt_tokens)
            for request, row, start, count, samples in zip(
                step.requests, batch.rows, batch.starts, batch.counts, batch.samples, strict=True
            )
        )
        record = StepRecord(
            step=batch.step,
            started_at=launched.started_at,
            finished_at=finished_at,
            slots=slots,
            admitted_ids=tuple(admission.request.request_id for admission in batch.admissions),
            preempted=tuple(step.preempted),
            finished_ids=tuple(delta.request_id for delta in deltas if delta.finish_reason),
            idle_rows=tuple(request.row for request in pool.lingering),
            num_running=len(pool.running),
            num_waiting=pool.num_waiting,
            kv=step.kv,
            error=error,
            scheduled_at=launched.scheduled_at,
            began_at=began_at,
            updated_at=updated_at,
        )
        self._emit(record)

    def _emit(self, record: StepRecord) -> None:
        arrived, aborted = tuple(self._arrived), tuple(self._aborted)
        self._arrived.clear()
        self._aborted.clear()
        notify(self.observers, replace(record, engine_id=self.engine_id, arrived=arrived, aborted=aborted))


def notify(observers: list[StepObserver], record: StepRecord) -> None:
    """Call all observers with the record, and remove those that raise: observers must not break the engine."""
    for observer in observers[:]:
        try:
            observer(record)
        except Exception:
            logger.exception("an observer of steps failed and was removed")
            observers.remove(observer)
