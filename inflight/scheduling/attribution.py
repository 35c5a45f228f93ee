"""Where the time of every request goes.

A request is in one phase at a time, and its phases follow each other without a gap, so their parts add up to its
latency. What many wait for at once is measured once, by clocks of the whole engine that only ever go on: one for each
reason why nobody was admitted, and one for what steps took longer because prompts were in them. A request remembers
where they stood when its phase began. So a step costs as much as one phase change does, whoever waits.

Times are given, never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from inflight.events import QUEUE_CAUSES, TimeBreakdown
from inflight.request import Phase, Request


@dataclass(slots=True)
class Attribution:
    """The engine's clocks, and the bookkeeping of phases."""

    _waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUE_CAUSES, 0.0))
    _cause: str = QUEUE_CAUSES[0]  # why those who wait do so now
    _waited_until: float = 0.0
    _beside_prompts: float = 0.0  # that steps took longer because of prompts in them
    _updated_at: float = 0.0  # the end of the last step
    _plain_seconds: float | None = None  # that the last step without prompts took

    # ---- the engine ----

    def blame(self, cause: str, now: float) -> None:
        """From now on, whoever waits does so for this reason."""
        self._run_queue_clock(now)
        self._cause = cause

    def _run_queue_clock(self, now: float) -> None:
        self._waited[self._cause] += max(0.0, now - self._waited_until)
        self._waited_until = max(now, self._waited_until)

    def step_ended(self, now: float, prompt_share: float) -> None:
        """A step's results are there; `prompt_share` of its tokens were prompts'."""
        seconds = now - self._updated_at
        self._updated_at = now
        if not prompt_share:
            self._plain_seconds = seconds
        elif self._plain_seconds is None:
            self._beside_prompts += prompt_share * seconds
        else:
            self._beside_prompts += max(0.0, seconds - self._plain_seconds)

    def step_failed(self, now: float) -> None:
        self._updated_at = now

    # ---- requests ----

    def enter(self, request: Request, phase: Phase, now: float) -> None:
        """The request's phase ends, and another begins."""
        request.record.breakdown = self.breakdown(request, now)
        request.phase, request.phase_at = phase, now
        if phase is Phase.QUEUED:
            self._run_queue_clock(now)
            request.phase_clocks = tuple(self._waited.values())
        elif phase is Phase.DECODING:
            request.phase_clocks = (self._beside_prompts,)

    def breakdown(self, request: Request, now: float) -> TimeBreakdown:
        """Where the request's time went until now."""
        found, seconds = request.record.breakdown, now - request.phase_at
        match request.phase:
            case Phase.QUEUED:
                self._run_queue_clock(now)
                waited = zip(QUEUE_CAUSES, self._waited.values(), request.phase_clocks, strict=True)
                return replace(found, queue={cause: after - before for cause, after, before in waited})
            case Phase.PREFILLING:
                return replace(found, prefill=found.prefill + seconds)
            case Phase.DECODING:
                others = min(seconds, self._beside_prompts - request.phase_clocks[0])
                return replace(
                    found,
                    decode=found.decode + seconds - others,
                    prefill_of_others=found.prefill_of_others + others,
                )
            case Phase.PREEMPTED:
                return replace(found, preempted=found.preempted + seconds)
            case Phase.HELD:
                return replace(found, held=found.held + seconds)
            case Phase.NEW | Phase.OVER:
                return found
