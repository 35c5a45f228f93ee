"""A wrapper that keeps the engine running whatever a user's policy returns.

Every result of the policy is checked. An invalid one (out of range, of the wrong type, or an exception) is logged once
per method and replaced by the result of the base policy. So is a result that would stop all progress.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from inflight.errors import shown
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policy import Policy, next_candidate

logger = logging.getLogger(__name__)

_RAISED = object()  # returned by `_call` when the policy raised


class CheckedPolicy(Policy):
    """Wraps a policy and validates its results.

    It also keeps its own set of the waiting requests. Its own queue holds those that the policy failed to accept; they
    are served first-come-first-served.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._waiting: dict[Request, None] = {}
        self._overruled = False
        self._warned: set[str] = set()  # methods whose results were logged as invalid

    @contextmanager
    def overruled(self) -> Iterator[None]:
        """Let the base policy decide in this context, because the wrapped one would run nothing on an idle engine."""
        self._warn_once("schedule", "it lets no request run, although nothing else is in progress")
        self._overruled = True
        try:
            yield
        finally:
            self._overruled = False

    # ---- calling the policy ----

    def _call(self, method: str, *args: object) -> Any:
        try:
            return getattr(self.policy, method)(*args)
        except Exception:
            self._warn_once(method, "it raised an exception", with_traceback=True)
            return _RAISED

    def _warn_invalid(self, method: str, result: object) -> None:
        if result is not _RAISED:  # the exception has been logged
            self._warn_once(method, f"it returned {_describe(result)}")

    def _warn_once(self, method: str, problem: str, with_traceback: bool = False) -> None:
        if method not in self._warned:
            self._warned.add(method)
            logger.warning(
                "policy %s, %s: %s. Falling back to first-come-first-served; further warnings for this method are "
                "suppressed.",
                type(self.policy).__name__,
                method,
                problem,
                exc_info=with_traceback,
            )

    def _call_bool(self, method: str, base: bool, *args: object) -> bool:
        result = self._call(method, *args)
        if isinstance(result, bool):
            return result
        self._warn_invalid(method, result)
        return base

    # ---- the queue ----

    def push(self, request: Request, step: int) -> None:
        self._waiting[request] = None
        if self._call("push", request, step) is _RAISED:
            super().push(request, step)

    def remove(self, request: Request) -> None:
        del self._waiting[request]
        if request in self.queue:
            super().remove(request)
        else:
            self._call("remove", request)

    def __len__(self) -> int:
        return len(self._waiting)

    def candidates(self) -> Generator[Request, bool, None]:
        tried: set[Request] = set()
        if not self._overruled:
            yield from super().candidates()
            if len(self.queue):  # a request that the policy failed to accept does not fit yet
                return
            is_valid = yield from self._valid_candidates("candidates", tried)
            if is_valid:
                return
        while len(tried) < len(self._waiting):
            rest = (request for request in self._waiting if request not in tried)
            request = min(rest, key=lambda request: request.arrival)
            tried.add(request)
            admitted = yield request
            if not admitted:
                return
            tried.discard(request)

    def _valid_candidates(
        self, method: str, tried: set[Request], *args: object
    ) -> Generator[Request, bool, bool]:
        """Yield the waiting requests that the policy names. Return False at the first invalid one."""
        try:
            candidates = iter(getattr(self.policy, method)(*args))
            request = next(candidates, None)
            while request is not None:
                if request not in self._waiting or request in tried:
                    self._warn_invalid(method, request)
                    return False
                tried.add(request)
                admitted = yield request
                if admitted:
                    tried.discard(request)
                request = next_candidate(candidates, admitted)
        except Exception:
            self._warn_once(method, "it raised an exception", with_traceback=True)
            return False
        return True

    # ---- waiting prompts against running prompts ----

    def tokens_ahead(self, prompts: Sequence[Request], budget: int) -> int:
        if self._overruled:
            return 0
        result = self._call("tokens_ahead", prompts, budget)
        count = _as_int(result)
        if count is not None and 0 <= count <= budget:
            return count
        self._warn_invalid("tokens_ahead", result)
        return 0

    def candidates_ahead(self, prompts: Sequence[Request]) -> Generator[Request, bool, None]:
        yield from self._valid_candidates("candidates_ahead", set(), prompts)

    def prompts(self, running: Sequence[Request]) -> Sequence[Request]:
        result = running if self._overruled else self._call("prompts", running)
        if result is running:
            return running
        try:
            chosen = list(islice(result, len(running) + 1))
            is_valid = len(set(chosen)) == len(chosen) and set(running).issuperset(chosen)
        except Exception:  # not requests, or not even iterable
            is_valid = False
        if not is_valid:
            self._warn_invalid("prompts", result)
            return running
        return chosen

    # ---- the decisions ----

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        return self._overruled or self._call_bool("admits", True, request, running)

    def tokens(self, request: Request, num_remaining: int, budget: int) -> int:
        if not self._overruled:
            result = self._call("tokens", request, num_remaining, budget)
            count = _as_int(result)
            if count is not None and 0 <= count <= min(num_remaining, budget):
                return count
            self._warn_invalid("tokens", result)
        return super().tokens(request, num_remaining, budget)

    def memory_to_admit(self, request: Request, running: Sequence[Request]) -> int:
        if not self._overruled:
            result = self._call("memory_to_admit", request, running)
            count = _as_int(result)
            if count is not None and count >= 0:
                return count
            self._warn_invalid("memory_to_admit", result)
        return super().memory_to_admit(request, running)

    def allocates_at_once(self) -> bool:
        return not self._overruled and self._call_bool("allocates_at_once", False)

    def victim(self, candidates: Sequence[Request]) -> Request:
        result = self._call("victim", candidates)
        if any(result is request for request in candidates):
            chosen: Request = result
            return chosen
        self._warn_invalid("victim", result)
        return max(candidates, key=lambda request: request.arrival)

    def yields(self, running: Sequence[Request]) -> Sequence[Request]:
        result = self._call("yields", running)
        try:
            chosen = dict.fromkeys(islice(result, len(running) + 1))
        except Exception:  # not requests, or not even iterable
            self._warn_invalid("yields", result)
            return ()
        if not chosen:
            return ()
        # The request that arrived first always stays, so that at least one makes progress.
        staying = min(running, key=lambda request: request.arrival, default=None)
        allowed = [request for request in running if request in chosen and request is not staying]
        if len(allowed) != len(chosen):
            self._warn_invalid("yields", result)
        return allowed

    def leaves(self, request: Request, running: Sequence[Request]) -> bool:
        stays = not self._call_bool("leaves", True, request, running)
        if stays and not running:
            self._warn_invalid("leaves", False)  # nothing is left that it could wait for
            return True
        return not stays

    # ---- notifications ----

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self.policy.set_weights(weights)

    def set_num_left(self, num_left: Callable[[Request], int]) -> None:
        self._call("set_num_left", num_left)

    def on_admit(self, request: Request) -> None:
        self._call("on_admit", request)

    def on_batch(self, step: ScheduledStep) -> None:
        self._call("on_batch", step)


def _as_int(result: object) -> int | None:
    try:
        return operator.index(result)  # type: ignore[arg-type]  # raises if it is not an integer
    except TypeError:
        return None


def _describe(result: object) -> str:
    try:
        return shown(result.request_id if isinstance(result, Request) else result)
    except Exception:
        return f"a {type(result).__name__} whose repr() fails"
