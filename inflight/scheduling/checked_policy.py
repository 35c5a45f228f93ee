"""Whatever the policy answers, the engine goes on.

Asks the user's policy and looks at every answer. One that makes no sense (out of range, of a wrong type, or an
exception) is logged, once for each question, and replaced by what the base policy would say. So are answers that would
let nobody get on.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policy import Policy, answer

logger = logging.getLogger(__name__)

_RAISED = object()  # in place of an answer


class CheckedPolicy(Policy):
    """Stands before a policy. Who waits is known here, too: in this class's own queue are the requests that the policy
    failed to take, first come, first served."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._waiting: dict[Request, None] = {}
        self._overruled = False
        self._told: set[str] = set()  # questions whose answers were complained about

    @contextmanager
    def overruled(self) -> Iterator[None]:
        """Meanwhile the base policy decides: the other one would let nobody run in an engine that is empty."""
        self._complain("schedule", "it lets nobody run, though nothing else is going on")
        self._overruled = True
        try:
            yield
        finally:
            self._overruled = False

    # ---- asking ----

    def _ask(self, question: str, *given: object) -> Any:
        try:
            return getattr(self.policy, question)(*given)
        except Exception:
            self._complain(question, "it raised an exception", with_traceback=True)
            return _RAISED

    def _nonsense(self, question: str, found: object) -> None:
        if found is not _RAISED:  # that has been told
            self._complain(question, f"it answered {_shown(found)}")

    def _complain(self, question: str, what: str, with_traceback: bool = False) -> None:
        if question not in self._told:
            self._told.add(question)
            logger.warning(
                "policy %s, %s: %s. First come, first served stands in, and this is not told again.",
                type(self.policy).__name__,
                question,
                what,
                exc_info=with_traceback,
            )

    def _flag(self, question: str, base: bool, *given: object) -> bool:
        found = self._ask(question, *given)
        if isinstance(found, bool):
            return found
        self._nonsense(question, found)
        return base

    # ---- the queue ----

    def push(self, request: Request, step: int) -> None:
        self._waiting[request] = None
        if self._ask("push", request, step) is _RAISED:
            super().push(request, step)

    def remove(self, request: Request) -> None:
        del self._waiting[request]
        if request in self.queue:
            super().remove(request)
        else:
            self._ask("remove", request)

    def __len__(self) -> int:
        return len(self._waiting)

    def candidates(self) -> Generator[Request, bool, None]:
        offered: set[Request] = set()
        if not self._overruled:
            yield from super().candidates()
            if len(self.queue):  # one that the policy failed to take does not fit yet
                return
            makes_sense = yield from self._offers("candidates", offered)
            if makes_sense:
                return
        while len(offered) < len(self._waiting):
            rest = (request for request in self._waiting if request not in offered)
            request = min(rest, key=lambda request: request.arrival)
            offered.add(request)
            admitted = yield request
            if not admitted:
                return
            offered.discard(request)

    def _offers(self, question: str, offered: set[Request], *given: object) -> Generator[Request, bool, bool]:
        """The waiting requests that the policy answers. False as soon as one of them makes no sense."""
        try:
            candidates = iter(getattr(self.policy, question)(*given))
            request = next(candidates, None)
            while request is not None:
                if request not in self._waiting or request in offered:
                    self._nonsense(question, request)
                    return False
                offered.add(request)
                admitted = yield request
                if admitted:
                    offered.discard(request)
                request = answer(candidates, admitted)
        except Exception:
            self._complain(question, "it raised an exception", with_traceback=True)
            return False
        return True

    # ---- prompts that wait against prompts that run ----

    def reserved(self, prompts: Sequence[Request], budget: int) -> int:
        if self._overruled:
            return 0
        found = self._ask("reserved", prompts, budget)
        count = _integer(found)
        if count is not None and 0 <= count <= budget:
            return count
        self._nonsense("reserved", found)
        return 0

    def ahead(self, prompts: Sequence[Request]) -> Generator[Request, bool, None]:
        yield from self._offers("ahead", set(), prompts)

    def prompts(self, running: Sequence[Request]) -> Sequence[Request]:
        found = running if self._overruled else self._ask("prompts", running)
        if found is running:
            return running
        try:
            chosen = list(islice(found, len(running) + 1))
            makes_sense = len(set(chosen)) == len(chosen) and set(running).issuperset(chosen)
        except Exception:  # no requests, or not even a sequence
            makes_sense = False
        if not makes_sense:
            self._nonsense("prompts", found)
            return running
        return chosen

    # ---- the decisions ----

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        return self._overruled or self._flag("admits", True, request, running)

    def tokens(self, request: Request, wanted: int, budget: int) -> int:
        if not self._overruled:
            found = self._ask("tokens", request, wanted, budget)
            count = _integer(found)
            if count is not None and 0 <= count <= min(wanted, budget):
                return count
            self._nonsense("tokens", found)
        return super().tokens(request, wanted, budget)

    def reserve(self, request: Request, running: Sequence[Request]) -> int:
        if not self._overruled:
            found = self._ask("reserve", request, running)
            count = _integer(found)
            if count is not None and count >= 0:
                return count
            self._nonsense("reserve", found)
        return super().reserve(request, running)

    def reserves_ahead(self) -> bool:
        return self._flag("reserves_ahead", False)

    def victim(self, candidates: Sequence[Request]) -> Request:
        found = self._ask("victim", candidates)
        if any(found is request for request in candidates):
            chosen: Request = found
            return chosen
        self._nonsense("victim", found)
        return max(candidates, key=lambda request: request.arrival)

    def yields(self, running: Sequence[Request]) -> Sequence[Request]:
        found = self._ask("yields", running)
        try:
            chosen = dict.fromkeys(islice(found, len(running) + 1))
        except Exception:  # no requests, or not even a sequence
            self._nonsense("yields", found)
            return ()
        if not chosen:
            return ()
        # The oldest one stays, so that there is always someone who gets on.
        staying = min(running, key=lambda request: request.arrival, default=None)
        allowed = [request for request in running if request in chosen and request is not staying]
        if len(allowed) != len(chosen):
            self._nonsense("yields", found)
        return allowed

    def leaves(self, request: Request, running: Sequence[Request]) -> bool:
        stays = not self._flag("leaves", True, request, running)
        if stays and not running:
            self._nonsense("leaves", False)  # nothing will happen that it could wait for
            return True
        return not stays

    # ---- what happened ----

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self.policy.set_weights(weights)

    def set_num_left(self, num_left: Callable[[Request], int]) -> None:
        self._ask("set_num_left", num_left)

    def on_admit(self, request: Request) -> None:
        self._ask("on_admit", request)

    def on_batch(self, step: ScheduledStep) -> None:
        self._ask("on_batch", step)


def _integer(found: object) -> int | None:
    try:
        return operator.index(found)  # type: ignore[arg-type]  # what is none raises
    except TypeError:
        return None


def _shown(found: object) -> str:
    try:
        return f"{found.request_id if isinstance(found, Request) else found!r:.100}"
    except Exception:
        return f"a {type(found).__name__} that cannot be shown"
