"""Attributes the latency of every request to its causes.

A request is in one phase at a time, and phases follow each other without a gap, so they add up to its latency. Time
that many requests spend waiting together is measured once, by engine-wide clocks that only advance: one per reason why
no request was admitted, and one for the time that prompts added to steps. A request remembers the readings when its
phase began, so the cost of a step does not depend on how many requests wait.

Times are passed in; no clock is read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from inflight.events import QUEUE_CAUSES, TimeBreakdown
from inflight.request import Phase, Request


@dataclass(slots=True)
class Attribution:
    """The engine-wide clocks, and the bookkeeping of phases."""

    _waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUE_CAUSES, 0.0))
    _cause: str = QUEUE_CAUSES[0]  # why requests are waiting now
    _waited_until: float = 0.0
    _prompt_delay: float = 0.0  # seconds that prompts have added to steps
    _updated_at: float = 0.0  # the end of the last step
    _plain_seconds: float | None = None  # duration of the last step without prompts

    # ---- the engine ----

    def set_queue_cause(self, cause: str, now: float) -> None:
        """Attribute waiting time from now on to this cause."""
        self._run_queue_clock(now)
        self._cause = cause

    def _run_queue_clock(self, now: float) -> None:
        self._waited[self._cause] += max(0.0, now - self._waited_until)
        self._waited_until = max(now, self._waited_until)

    def step_ended(self, now: float, prompt_share: float) -> None:
        """Account for a step that was collected; `prompt_share` of its tokens belonged to prompts."""
        seconds = now - self._updated_at
        self._updated_at = now
        if not prompt_share:
            self._plain_seconds = seconds
        elif self._plain_seconds is None:
            self._prompt_delay += prompt_share * seconds
        else:
            self._prompt_delay += max(0.0, seconds - self._plain_seconds)

    def step_failed(self, now: float) -> None:
        self._updated_at = now

    # ---- requests ----

    def enter(self, request: Request, phase: Phase, now: float) -> None:
        """End the request's phase and begin another."""
        request.record.breakdown = self.breakdown(request, now)
        request.phase, request.phase_at = phase, now
        if phase is Phase.QUEUED:
            self._run_queue_clock(now)
            request.phase_clocks = tuple(self._waited.values())
        elif phase is Phase.DECODING:
            request.phase_clocks = (self._prompt_delay,)

    def breakdown(self, request: Request, now: float) -> TimeBreakdown:
        """Return where the request's time went until now."""
        earlier, seconds = request.record.breakdown, now - request.phase_at
        match request.phase:
            case Phase.QUEUED:
                self._run_queue_clock(now)
                waited = zip(QUEUE_CAUSES, self._waited.values(), request.phase_clocks, strict=True)
                return replace(earlier, queue={cause: after - before for cause, after, before in waited})
            case Phase.PREFILLING:
                return replace(earlier, prefill=earlier.prefill + seconds)
            case Phase.DECODING:
                others = min(seconds, self._prompt_delay - request.phase_clocks[0])
                return replace(
                    earlier,
                    decode=earlier.decode + seconds - others,
                    prefill_of_others=earlier.prefill_of_others + others,
                )
            case Phase.PREEMPTED:
                return replace(earlier, preempted=earlier.preempted + seconds)
            case Phase.HELD:
                return replace(earlier, held=earlier.held + seconds)
            case Phase.NEW | Phase.OVER:
                return earlier
