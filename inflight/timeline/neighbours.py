"""Which other requests made one slow: their prompts stretched its steps, or they ran while it had to wait."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from inflight.timeline.chunks import Chunk, RecordedRequest, SlotKind

MAX_NEIGHBOURS = 8


Why = Literal["prompt", "queue", "preemption"]


class Neighbour(NamedTuple):
    """A request that cost another one time, and how."""

    info: RecordedRequest
    seconds: float
    why: Why


def neighbours_of(number: int, chunks: Iterable[Chunk]) -> list[Neighbour]:
    """Return the requests that cost a request most time, the most expensive first.

    A prompt costs every decode in the same step the time by which that step is longer than the last one without
    prompts; several prompts share it by their tokens. While a request waits, in the queue or after a preemption, the
    others that run share the time equally.
    """
    analysis = _Analysis(number)
    for chunk in chunks:
        analysis.read(chunk)
    costs = sorted(analysis.costs.items(), key=lambda item: -item[1])
    return [
        Neighbour(analysis.infos[other], seconds, why)
        for (other, why), seconds in costs[:MAX_NEIGHBOURS]
        if other in analysis.infos
    ]


class _Analysis:
    def __init__(self, number: int) -> None:
        self.number = number
        self.costs: dict[tuple[int, Why], float] = defaultdict(float)
        self.infos: dict[int, RecordedRequest] = {}
        self._plain_seconds: float | None = None  # duration of the last step without prompts
        self._waits: Why | None = None  # where it waits
        self._arrived_at = -math.inf  # unless the recording has its arrival

    def read(self, chunk: Chunk) -> None:
        self.infos |= {info.number: info for info in chunk.requests}
        times = chunk.times
        durations = [
            sum(parts) / 1e6
            for parts in zip(
                *(chunk.column(name) for name in ("schedule", "launch", "device", "update")), strict=True
            )
        ]
        activity: dict[int, int] = {}  # what the request did, by step
        prompts: dict[int, dict[int, int]] = defaultdict(dict)  # by step: the tokens of each prompt
        present: dict[int, list[int]] = defaultdict(list)
        for run in chunk.runs():
            for step in range(run.first_step, run.first_step + run.num_steps):
                present[step].append(run.request)
                if run.request == self.number:
                    activity[step] = run.kind
                elif run.kind == SlotKind.PREFILL:
                    prompts[step][run.request] = run.tokens_per_step
        preempted = {event.step for event in chunk.events if _is(event, self.number, "preempt")}
        admitted = {event.step for event in chunk.events if _is(event, self.number, "admit")}
        for event in chunk.events:
            if _is(event, self.number, "arrive"):
                self._waits, self._arrived_at = "queue", event.at
        for index, scheduled_at in enumerate(times):
            step, seconds = chunk.first_step + index, durations[index]
            if step in preempted:
                self._waits = "preemption"
            if step in admitted:
                self._waits = None
            waits = self._waits if scheduled_at >= self._arrived_at else None
            self._add_step(activity.get(step), seconds, prompts.get(step, {}), present.get(step, []), waits)

    def _add_step(
        self,
        slot_kind: int | None,
        seconds: float,
        prompts: dict[int, int],
        present: list[int],
        waits: Why | None,
    ) -> None:
        if not prompts and slot_kind != SlotKind.PREFILL:
            self._plain_seconds = seconds
        if slot_kind == SlotKind.DECODE and prompts:
            delay = max(0.0, seconds - (self._plain_seconds or 0.0))
            num_tokens = sum(prompts.values())
            for other, count in prompts.items():
                self.costs[other, "prompt"] += delay * count / num_tokens
        elif slot_kind is None and waits and present:
            for other in present:
                self.costs[other, waits] += seconds / len(present)


def _is(event: object, number: int, event_type: str) -> bool:
    return getattr(event, "request", None) == number and getattr(event, "type", None) == event_type
