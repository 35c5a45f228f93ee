"""Whose fault was it? The requests of a step that failed are tried one by one.

A step that raises does not say which of its requests brought it down. One that was alone in it did. Otherwise all
of them are suspects, and until the last is tried this policy stands in for the engine's own:

    a, b, c fail together      everyone goes back to the queue; a, b and c are suspects
    a alone: its token comes   cleared, back to the queue
    b alone: fails             ends with the error
    c alone: its token comes   cleared, back to the queue
    no suspect is left         the engine's policy again, on an empty engine
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from inflight.request import Request, Status
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policy import Policy

# Steps that may fail around a request without anyone failing alone, before it ends with the error all the same: a
# fault that shows only in company would come back as often as its requests are cleared.
MAX_FAILURES = 3


class Quarantine(Policy):
    """Runs suspects alone, oldest first. The queue and its accounts stay with the policy that it stands in for.

    How a step and the memory are divided is the base's to say: with one request there is nothing to divide, and a
    policy that would keep that one waiting must not be asked.
    """

    def __init__(self, policy: Policy, lift: Callable[[], None]) -> None:
        super().__init__()
        self.policy = policy
        self._lift = lift
        self._suspects: dict[Request, int] = {}  # how many tokens each had when its step failed
        self._num_failures: dict[Request, int] = {}  # of steps for which no one is known to be the cause

    def judge(self, step: ScheduledStep) -> list[int]:
        """The step failed: the entries whose requests end with its error. The others become suspects."""
        if len(step) == 1:
            if step.requests[0] in self._num_failures:  # now it is known whose fault it was in company
                self._num_failures.clear()
            return [0]
        self._num_failures = {
            request: count for request, count in self._num_failures.items() if _is_live(request)
        }
        guilty = []
        for index, request in enumerate(step.requests):
            if not _is_live(request):
                continue  # it had all its tokens before this step
            count = self._num_failures.get(request, 0) + 1
            if count >= MAX_FAILURES:
                guilty.append(index)
            else:
                self._num_failures[request] = count
                self._suspects[request] = len(request.token_ids)
        return guilty

    def _on_trial(self) -> Request | None:
        """The oldest suspect. One that has a new token is cleared: a step has computed all that it had, alone."""
        self._suspects = {
            request: num_tokens
            for request, num_tokens in self._suspects.items()
            if len(request.token_ids) == num_tokens and _is_live(request)
        }
        return min(self._suspects, key=lambda request: request.arrival, default=None)

    # What differs.

    def yields(self, running: Sequence[Request]) -> Sequence[Request]:
        suspect = self._on_trial()
        if suspect is None:
            self._lift()
        return [request for request in running if request is not suspect]

    def candidates(self) -> Generator[Request, bool, None]:
        suspect = self._on_trial()
        if suspect is not None and suspect.status is Status.WAITING:
            yield suspect

    # What does not.

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
