"""Finds the request that made a step fail by running its requests one at a time.

A step that raises does not say which of its requests caused it. A request that was alone in it did. Otherwise all of
them are suspects, and this policy replaces the engine's own until each has been tried:

    a, b, c fail together      all requests go back to the queue; a, b and c are suspects
    a alone: its token comes   cleared, back to the queue
    b alone: fails             ends with the error
    c alone: its token comes   cleared, back to the queue
    no suspect is left         the engine's policy takes over again, on an empty engine
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from inflight.request import Request, Status
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policy import Policy

# Shared steps of a request that may fail while no request fails alone, before it ends with the error anyway. Otherwise
# a fault that only occurs in combination would recur each time its requests are cleared.
MAX_FAILURES = 3


class Quarantine(Policy):
    """Runs suspects alone, oldest first. The queue stays with the policy that it replaces.

    The base class divides the step and the memory: with one request there is nothing to divide, and the replaced policy
    must not be able to keep that request waiting.
    """

    def __init__(self, policy: Policy, lift: Callable[[], None]) -> None:
        super().__init__()
        self.policy = policy
        self._lift = lift
        self._suspects: dict[Request, int] = {}  # and the tokens that each had when its step failed
        self._num_failures: dict[Request, int] = {}  # failed steps of unknown cause

    def entries_to_fail(self, step: ScheduledStep) -> list[int]:
        """Return the entries of a failed step whose requests end with its error. The others become suspects."""
        if len(step) == 1:
            if step.requests[0] in self._num_failures:  # this explains the failures of shared steps, too
                self._num_failures.clear()
            return [0]
        self._num_failures = {
            request: count for request, count in self._num_failures.items() if _is_live(request)
        }
        failed_entries = []
        for index, request in enumerate(step.requests):
            if not _is_live(request):
                continue  # it had all its tokens before this step
            count = self._num_failures.get(request, 0) + 1
            if count >= MAX_FAILURES:
                failed_entries.append(index)
            else:
                self._num_failures[request] = count
                self._suspects[request] = len(request.token_ids)
        return failed_entries

    def _current_suspect(self) -> Request | None:
        """Return the oldest suspect, after clearing those with a new token: they ran alone without failing."""
        self._suspects = {
            request: num_tokens
            for request, num_tokens in self._suspects.items()
            if len(request.token_ids) == num_tokens and _is_live(request)
        }
        return min(self._suspects, key=lambda request: request.arrival, default=None)

    # Overridden.

    def yields(self, running: Sequence[Request]) -> Sequence[Request]:
        suspect = self._current_suspect()
        if suspect is None:
            self._lift()
        return [request for request in running if request is not suspect]

    def candidates(self) -> Sequence[Request]:
        suspect = self._current_suspect()
        return [suspect] if suspect is not None and suspect.status is Status.WAITING else []

    # Delegated.

    def push(self, request: Request, step: int) -> None:
        self.policy.push(request, step)

    def remove(self, request: Request) -> None:
        self.policy.remove(request)

    def __len__(self) -> int:
        return len(self.policy)

    def leaves(self, request: Request, running: Sequence[Request]) -> bool:
        return self.policy.leaves(request, running)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self.policy.set_weights(weights)

    def set_num_left(self, num_left: Callable[[Request], int]) -> None:
        self.policy.set_num_left(num_left)

    def on_admit(self, request: Request) -> None:
        self.policy.on_admit(request)

    def on_batch(self, step: ScheduledStep) -> None:
        self.policy.on_batch(step)


def _is_live(request: Request) -> bool:
    return request.status in (Status.WAITING, Status.RUNNING)
