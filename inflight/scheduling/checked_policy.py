"""A wrapper that keeps the engine running whatever a user's policy returns.

Every result of the policy is checked. An invalid one (out of range, of the wrong type, or an exception) is logged once
per method and replaced by the result of the base policy. So is a result that would stop all progress.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from inflight.errors import shown
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policy import Policy

logger = logging.getLogger(__name__)


# ---- checks: they return the result, or raise whatever comparing or iterating over nonsense raises ----


class InvalidResultError(Exception):
    """A result that a method of a policy must not return."""


def _require(is_valid: bool) -> None:
    if not is_valid:
        raise InvalidResultError


def _flag(result: Any, *_: object) -> bool:
    _require(isinstance(result, bool))
    return bool(result)


def _count(result: Any, most: float) -> int:
    count = operator.index(result)
    _require(0 <= count <= most)
    return count


def _distinct(result: Any, allowed: Sequence[Request]) -> Sequence[Request]:
    chosen = list(islice(result, len(allowed) + 1))
    _require(len(set(chosen)) == len(chosen) and set(allowed).issuperset(chosen))
    return chosen


def _yielding(result: Any, running: Sequence[Request]) -> Sequence[Request]:
    """The request that arrived first always stays, so that at least one makes progress."""
    chosen = list(islice(result, len(running) + 1))
    if not chosen:
        return chosen
    first = min(running, key=_arrival, default=None)
    return _distinct(chosen, [request for request in running if request is not first])


def _leaving(result: Any, _: Request, running: Sequence[Request]) -> bool:
    _require(result is not False or len(running) > 0)  # otherwise nothing is left that it could wait for
    return _flag(result)


def _arrival(request: Request) -> int:
    return request.arrival


def _last_arrived(_: Policy, candidates: Sequence[Request]) -> Request:
    """Return the base policy's victim, whatever order the wrapped policy has given the requests."""
    return max(candidates, key=_arrival)


def _checked(
    method: Callable[..., Any], check: Callable[..., Any], base: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a method that asks the wrapped policy and checks its result, given the result and the arguments.

    If the result is invalid or the policy is overruled, the base policy's is returned.
    """
    name, base = method.__name__, base or method

    def ask(self: CheckedPolicy, *args: Any) -> Any:
        if self._is_overruled:
            return base(self, *args)
        try:
            result = getattr(self.policy, name)(*args)
        except Exception as error:
            self._warn_once(name, error)
            return base(self, *args)
        try:
            return check(result, *args)
        except Exception:
            self._warn_once(name, InvalidResultError(f"it returned {_describe(result)}"))
            return base(self, *args)

    return ask


class CheckedPolicy(Policy):
    """Wraps a policy and validates its results.

    It also keeps its own set of the waiting requests. Its own queue holds the requests that the policy failed
    to accept; they are served first-come-first-served.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._waiting: dict[Request, None] = {}
        self._is_overruled = False
        self._warned: set[str] = set()  # methods whose results were logged as invalid

    tokens_ahead = _checked(Policy.tokens_ahead, lambda result, _, budget: _count(result, budget))
    prompts = _checked(
        Policy.prompts, lambda result, all_: all_ if result is all_ else _distinct(result, all_)
    )
    admits = _checked(Policy.admits, _flag)
    tokens = _checked(Policy.tokens, lambda result, _, *limits: _count(result, min(limits)))
    memory_to_admit = _checked(Policy.memory_to_admit, lambda result, *_: _count(result, math.inf))
    allocates_at_once = _checked(Policy.allocates_at_once, _flag)
    victim = _checked(Policy.victim, lambda result, among: _distinct([result], among)[0], base=_last_arrived)
    yields = _checked(Policy.yields, _yielding)
    leaves = _checked(Policy.leaves, _leaving)

    # ---- the queue ----

    def push(self, request: Request, step: int) -> None:
        self._waiting[request] = None
        if not self._tell("push", request, step):
            super().push(request, step)

    def remove(self, request: Request) -> None:
        del self._waiting[request]
        if request in self.queue:
            super().remove(request)
        else:
            self._tell("remove", request)

    def __len__(self) -> int:
        return len(self._waiting)

    def candidates(self) -> Iterator[Request]:
        tried: set[Request] = set()
        if not self._is_overruled:
            yield from super().candidates()
            if len(self.queue):  # a request that the policy failed to accept does not fit yet
                return
            try:
                yield from self._valid(self.policy.candidates(), tried)
                return
            except Exception as error:
                self._warn_once("candidates", error)
        for request in sorted(self._waiting, key=_arrival):
            if request not in tried:
                yield request
                if request in self._waiting:  # refused
                    return

    def candidates_ahead(self, prompts: Sequence[Request]) -> Iterator[Request]:
        try:
            yield from self._valid(self.policy.candidates_ahead(prompts), set())
        except Exception as error:
            self._warn_once("candidates_ahead", error)

    def _valid(self, candidates: Iterable[Request], tried: set[Request]) -> Iterator[Request]:
        """Yield the candidates, and add them to `tried`. Raise if one is not waiting, or has been tried."""
        for request in candidates:
            if request not in self._waiting or request in tried:
                raise InvalidResultError(f"it returned {_describe(request)}")
            tried.add(request)
            yield request

    # ---- notifications ----

    def _tell(self, method: str, *args: object) -> bool:
        """Call a method that returns nothing. Return whether it succeeded."""
        try:
            getattr(self.policy, method)(*args)
        except Exception as error:
            self._warn_once(method, error)
            return False
        return True

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self.policy.set_weights(weights)

    def set_num_left(self, num_left: Callable[[Request], int]) -> None:
        self._tell("set_num_left", num_left)

    def on_admit(self, request: Request) -> None:
        self._tell("on_admit", request)

    def on_batch(self, step: ScheduledStep) -> None:
        self._tell("on_batch", step)

    # ---- when the policy is wrong ----

    @contextmanager
    def overruled(self) -> Iterator[None]:
        """Let the base policy decide in this context, because the wrapped one would run nothing on an idle engine."""
        problem = "it lets no request run, although nothing else is in progress"
        self._warn_once("schedule", InvalidResultError(problem))
        self._is_overruled = True
        try:
            yield
        finally:
            self._is_overruled = False

    def _warn_once(self, method: str, error: Exception) -> None:
        if method in self._warned:
            return
        self._warned.add(method)
        is_invalid = isinstance(error, InvalidResultError)
        logger.warning(
            "policy %s, %s: %s. Falling back to first-come-first-served; further warnings for this method are "
            "suppressed.",
            type(self.policy).__name__,
            method,
            error if is_invalid else "it raised an exception",
            exc_info=None if is_invalid else error,
        )


def _describe(result: object) -> str:
    try:
        return shown(result.request_id if isinstance(result, Request) else result)
    except Exception:
        return f"a {type(result).__name__} whose repr() fails"
