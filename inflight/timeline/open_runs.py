"""Turns steps into runs, at a cost that depends on what changes rather than on the size of the batch.

A run (`chunks.py`) is opened when a slot begins to do something and closed when it does something else. A request that
decodes mostly computes its next token in every step, so its run needs no attention until it stops doing that:

    the same requests as before      nothing changes: two lists and two sums are compared
    some join or leave               one set operation finds them, and only their entries are read
    anything else                    every entry is read, for example if tokens were drafted

Before entries are skipped, `_all_decode` checks that their requests do continue.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from inflight.events import Delta
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep
from inflight.timeline.chunks import RecordedRequest, SlotKind

DECODE, PREFILL, HELD = int(SlotKind.DECODE), int(SlotKind.PREFILL), int(SlotKind.HELD)


class StepOutcome(NamedTuple):
    """The results of a step that was collected or failed."""

    deltas: Sequence[Delta] = ()
    ended: Sequence[Request] = ()  # the requests that ended with it
    num_outputs: int = 0  # tokens in `deltas`
    several: bool = False  # whether some deltas have more than one
    refused: Mapping[int, int] = MappingProxyType({})  # as `Sampled.num_refused`
    error: str | None = None


@dataclass(slots=True)
class OpenRun:
    """A run that may continue in the next step."""

    slot: int
    info: RecordedRequest
    kind: int
    first_step: int
    tokens_per_step: int
    first_token: int
    counts: array[int] = field(default_factory=partial(array, "H"))
    num_ahead: int = 0  # tokens in `counts` that were returned in addition to one in each step

    def next_token(self, step: int) -> int:
        """Return the index of the token that it reaches in the next step."""
        return self.first_token + (step - self.first_step) * self.tokens_per_step + self.num_ahead

    def add_counts(self, step: int, outputs: int, refused: int) -> None:
        """Note what a step returned and refused. For steps that are not noted, that is one and none."""
        counts = self.counts
        num_usual = step - self.first_step - len(counts) // 2
        counts.extend((*(1, 0) * num_usual, outputs, refused))
        self.num_ahead += outputs - 1

    def begin_at(self, step: int) -> None:
        """Forget the steps before this one."""
        num_steps = step - self.first_step
        if num_steps > 0:
            returned = self.counts[: 2 * num_steps : 2]
            num_ahead = sum(returned) - len(returned)
            self.first_step = step
            self.first_token += num_steps * self.tokens_per_step + num_ahead
            self.num_ahead -= num_ahead
            del self.counts[: 2 * num_steps]

    def numbers(self, end_step: int, outputs: int | None) -> tuple[int, ...]:
        """Return the numbers of a `SlotRun` that ends before a step.

        It returned `outputs` tokens; None stands for as many as its decodes advanced by.
        """
        num_steps = end_step - self.first_step
        if outputs is None:
            outputs = num_steps + self.num_ahead if self.kind == DECODE else 0
        first = self.slot, self.info.number, self.kind, self.first_step
        return *first, num_steps, self.tokens_per_step, self.first_token, outputs


class OpenRuns:
    """The open run of each request that has a slot. Runs that end are passed to `close` with their end and outputs."""

    def __init__(
        self,
        describe: Callable[[Request], RecordedRequest],
        close: Callable[[OpenRun, int, int | None], None],
    ) -> None:
        self._describe = describe
        self._close_run = close
        self._runs: dict[Request, OpenRun] = {}
        self._decoding: set[Request] = set()  # the requests whose open run is one of decodes
        self._others: set[Request] = set()  # those with an open run of another kind
        # The sum of next_token(step) - step of all open runs of decodes: adding their number times the step gives the
        # sum of the positions that they should compute in it.
        self._sum_offsets = 0
        self._steady: list[Request] | None = None  # the last step's requests, if each is in a run of decodes
        self._held: dict[Request, int] = {}  # slots of requests that the policy keeps, after the last step
        # Requests that have ended while later steps of theirs were in flight: these return tokens that are dropped.
        self._ended: set[Request] = set()

    def __iter__(self) -> Iterator[OpenRun]:
        return iter(self._runs.values())

    def record(
        self, step: ScheduledStep, number: int, outcome: StepOutcome, lingering: Sequence[Request]
    ) -> None:
        """Continue, open and close runs with the next step."""
        batch, requests, num_outputs, error = step.batch, step.requests, outcome.num_outputs, outcome.error
        is_usual = error is None and not outcome.several and not outcome.refused
        is_same = requests == self._steady and not batch.admissions and not lingering
        if is_usual and is_same and self._all_decode(step, (), number, num_outputs):
            return
        for request in requests[len(requests) - len(batch.admissions) :]:
            if request in self._runs:  # it was preempted, and is back already
                self._close(request, number)
        changed = self._decoding.symmetric_difference(requests)
        joined = changed - self._decoding  # entries that are not expected to continue a run of decodes
        for request in (changed - joined) | (self._others - joined - self._held.keys()):
            self._close(request, number)
        entries: Sequence[int] = _positions(joined, requests)
        if is_usual and self._all_decode(step, entries, number, num_outputs):
            outputs_of = None
        else:
            outputs_of = _outputs_of(() if error else outcome.deltas)
            entries = self._continue_decodes(step, number, outputs_of, outcome.refused)
        for entry in entries:
            self._record_entry(step, entry, number, outputs_of, outcome)
        self._record_held(requests, number)
        self._held = {request: request.row for request in lingering}
        if self._ended:  # after a failure, nothing is in flight
            self._ended = {request for request in self._ended if request.num_in_flight and error is None}
        is_steady = len(self._decoding) == len(requests) == len(self._runs) and not self._held
        self._steady = requests if is_steady else None

    def _continue_decodes(
        self, step: ScheduledStep, number: int, outputs_of: dict[str, int], refused: Mapping[int, int]
    ) -> list[int]:
        """Continue the runs of decodes that returned tokens. Return the other entries."""
        rows, runs, others = step.batch.rows, self._runs, []
        # Hot loop: where tokens are drafted, it runs for every entry of every step.
        for entry, request in enumerate(step.requests):
            run, outputs = runs.get(request), outputs_of.get(request.request_id, 0)
            num_known = len(request.token_ids) - outputs
            if (
                not outputs
                or run is None
                or run.kind != DECODE
                or run.slot != rows[entry]
                or run.first_token + number - run.first_step + run.num_ahead != num_known - 1
            ):
                others.append(entry)
            elif outputs > 1 or entry in refused:
                run.add_counts(number, outputs, refused.get(entry, 0))
                self._sum_offsets += outputs - 1
        return others

    def _record_entry(
        self,
        step: ScheduledStep,
        entry: int,
        number: int,
        outputs_of: dict[str, int] | None,
        outcome: StepOutcome,
    ) -> None:
        """Record one entry of a step. `outputs_of` is None if each that samples returns one token."""
        batch, request = step.batch, step.requests[entry]
        start, samples = batch.starts[entry], batch.samples[entry]
        count = batch.counts[entry] - len(batch.drafts.get(entry, ()))
        if not samples:
            outputs = 0
        elif outputs_of is None:
            outputs = int(request not in self._ended)
        else:
            outputs = outputs_of.get(request.request_id, 0)
        if samples and not outputs and outcome.error is None:
            slot_kind = HELD  # the request had ended: the token was dropped
        elif start >= request.num_prompt_tokens and count == 1:
            slot_kind = DECODE
        else:
            slot_kind = PREFILL
        refused = outcome.refused.get(entry, 0)
        self._extend(request, batch.rows[entry], slot_kind, number, count, start, outputs, refused)

    def _record_held(self, requests: Sequence[Request], number: int) -> None:
        """Record the slots that the policy keeps for finished requests, except for those still in the batch."""
        present = set(requests) if self._held else ()
        for request, slot in self._held.items():
            if request not in present:
                self._extend(request, slot, HELD, number, 0, len(request.token_ids), 0)

    def end(self, request: Request, end_step: int) -> None:
        """Close the run of a request that has ended."""
        if request.num_in_flight:
            self._ended.add(request)
        if request in self._runs:
            self._close(request, end_step)

    def close_all(self, end_step: int) -> None:
        for request in list(self._runs):
            self._close(request, end_step)

    def _all_decode(
        self, step: ScheduledStep, except_for: Sequence[int], number: int, num_outputs: int
    ) -> bool:
        """Return whether all entries, except for some, continue the open runs of decodes.

        Each of them then computes one token at its next position and returns one. That is checked for all of them
        together: by the numbers of tokens and outputs, and by the sum of the positions.
        """
        batch, num_decodes = step.batch, len(self._decoding)
        num_tokens, sum_starts = batch.num_tokens, sum(batch.starts)
        num_expected = batch.samples.count(True)
        for entry in except_for:
            num_tokens -= batch.counts[entry]
            sum_starts -= batch.starts[entry]
            num_expected -= batch.samples[entry] and step.requests[entry] in self._ended
        return (
            num_decodes == len(step.requests) - len(except_for) == num_tokens
            and sum_starts == self._sum_offsets + number * num_decodes
            and num_expected == num_outputs
        )

    def forget_before(self, step: int) -> None:
        """Forget what runs did before a step, which no chunk needs any more."""
        for run in self._runs.values():
            if run.counts:
                run.begin_at(step)

    def _extend(
        self,
        request: Request,
        slot: int,
        slot_kind: int,
        number: int,
        count: int,
        start: int,
        outputs: int,
        refused: int = 0,
    ) -> None:
        """Continue the run of a slot with a step, or open another one."""
        run = self._runs.get(request)
        if run is not None:
            continues = (
                (run.slot, run.kind, run.tokens_per_step) == (slot, slot_kind, count)
                and run.next_token(number) == start
                and (slot_kind != DECODE or outputs > 0)
            )
            if not continues:
                self._close(request, number)
                run = None
        ends = (outputs > 0) if slot_kind == PREFILL else (slot_kind == DECODE and not outputs)
        if run is None:
            run = OpenRun(slot, self._describe(request), slot_kind, number, count, start)
            if ends:
                self._close_run(run, number + 1, outputs)
            else:
                self._open(request, run)
        elif ends:
            self._close(request, number + 1, outputs)
        if slot_kind == DECODE and outputs and (outputs > 1 or refused):
            run.add_counts(number, outputs, refused)
            self._sum_offsets += outputs - 1

    def _open(self, request: Request, run: OpenRun) -> None:
        self._runs[request] = run
        if run.kind == DECODE:
            self._decoding.add(request)
            self._sum_offsets += run.next_token(run.first_step) - run.first_step
        else:
            self._others.add(request)

    def _close(self, request: Request, end_step: int, outputs: int | None = None) -> None:
        run = self._runs.pop(request)
        self._steady = None
        if run.kind == DECODE:
            self._decoding.remove(request)
            self._sum_offsets -= run.next_token(end_step) - end_step
        else:
            self._others.remove(request)
        self._close_run(run, end_step, outputs)


def _positions(some: set[Request], requests: Sequence[Request]) -> list[int]:
    """Return the indices of some requests, from the last to the first: requests that join are near the end."""
    positions: list[int] = []
    index = len(requests)
    while len(positions) < len(some):
        index -= 1
        if requests[index] in some:
            positions.append(index)
    return positions


def _outputs_of(deltas: Sequence[Delta]) -> dict[str, int]:
    """Return the number of tokens for each request id.

    A request that the policy releases in the step of its last token has a second delta, without tokens.
    """
    return {delta.request_id: len(delta.token_ids) for delta in deltas if delta.token_ids}
