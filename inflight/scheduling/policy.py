"""Scheduling policies and token budgets: the choices that the scheduler leaves open.

The scheduler enforces limits, allocates memory and guarantees progress, whatever a policy returns. A policy decides the
order of the queue, which requests are admitted and which of them ahead of running prompts, how the tokens of a step are
divided, how much memory is set aside, which request is preempted and when a finished request leaves. A token budget
decides how many tokens a step may have.

`CheckedPolicy` keeps the engine running whatever a user's policy returns: an invalid result (out of range, of the wrong
type, or an exception) is logged once per method and replaced by the base policy's. So is one that would stop all
progress.
"""

from __future__ import annotations

import logging
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from inflight.errors import ConfigError, shown
from inflight.registry import Registry
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep

logger = logging.getLogger(__name__)

_Entry = tuple[float, int, Request]


class WaitingQueue:
    """The waiting requests, ordered by (`request.order`, `request.arrival`) as of when they were pushed.

    A heap with lazy removal: every operation is O(log n). A request that was pushed again may still have an old entry
    in the heap; `_waiting` holds its current one.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._waiting: dict[Request, _Entry] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def push(self, request: Request) -> None:
        entry = (request.order, request.arrival, request)
        self._waiting[request] = entry
        heappush(self._heap, entry)
        self._drop_dead()

    def remove(self, request: Request) -> None:
        self._waiting.pop(request, None)
        self._drop_dead()

    def _drop_dead(self) -> None:
        """Pop stale entries until the top of the heap is a waiting request."""
        heap, waiting = self._heap, self._waiting
        while heap and waiting.get(heap[0][2]) is not heap[0]:
            heappop(heap)

    def first(self) -> Request | None:
        return self._heap[0][2] if self._heap else None

    def head(self, count: int) -> list[Request]:
        """Return the first `count` requests, in order."""
        taken: list[_Entry] = []
        while self._heap and len(taken) < count:
            taken.append(heappop(self._heap))
            self._drop_dead()
        for entry in taken:
            heappush(self._heap, entry)
        return [request for _, _, request in taken]


# Tokens of growth kept free for every running request when another is admitted. On the ragged benchmark, with memory
# for a quarter of it, 32 takes 1.5% more steps than 0 and avoids 95% of its preemptions.
HEADROOM = 32


class Policy:
    """First-come-first-served, and the base class of every policy: override what should differ."""

    def __init__(self, headroom: int = HEADROOM) -> None:
        self.queue = WaitingQueue()
        self.headroom = headroom

    # The queue.

    def push(self, request: Request, step: int) -> None:  # noqa: ARG002
        """Set `request.order` and queue the request, which is new or was preempted.

        Here a preempted request keeps its order, since its arrival does not change. A policy that computes the order
        from something else should keep it too (`request.record.num_preemptions` is not 0), or the request may be
        preempted again and again. The scheduler does not depend on it.
        """
        request.order = request.arrival
        self.queue.push(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting request that was admitted or has ended."""
        self.queue.remove(request)

    def __len__(self) -> int:
        return len(self.queue)

    def candidates(self) -> Iterable[Request]:
        """Return the waiting requests in the order to try them.

        Each is admitted, and so removed from the queue, or refused before the next one is taken from an iterator. So a
        generator whose order depends on it asks whether the request that it yielded is still in the queue.
        """
        while (request := self.queue.first()) is not None:
            yield request
            if request in self.queue:  # refused, and none may pass it
                return

    # Waiting prompts against running prompts.

    def tokens_ahead(self, prompts: Sequence[Request], budget: int) -> int:  # noqa: ARG002
        """Return how many tokens of the step waiting requests may take ahead of the running `prompts`.

        `prompts` are running requests with several tokens left to compute; they get what the waiting ones do not use.
        `budget` is what decodes leave of the step. Called only if there is a free row.
        """
        return 0

    def candidates_ahead(self, prompts: Sequence[Request]) -> Iterable[Request]:  # noqa: ARG002
        """Return the waiting requests to try ahead of the running `prompts`, as `candidates` does.

        Called only if `tokens_ahead` is not 0. A request is admitted only if it leaves memory for the rest of
        `prompts`.
        """
        return ()

    def prompts(self, running: Sequence[Request]) -> Sequence[Request]:
        """Return running prompts in the order in which they get their chunks of the step. One left out gets none."""
        return running

    # The decisions.

    def admits(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        """Return whether the request may join the running ones."""
        return True

    def tokens(self, request: Request, num_remaining: int, budget: int) -> int:  # noqa: ARG002
        """Return how many of its remaining tokens a request gets of the step's remaining `budget`."""
        return min(num_remaining, budget)

    def memory_to_admit(self, request: Request, running: Sequence[Request]) -> int:
        """Return for how many tokens there must be memory so that the request may join the running ones."""
        return request.num_tokens + self.headroom * len(running)

    def allocates_at_once(self) -> bool:
        """Return whether memory for `memory_to_admit` tokens is allocated on admission, not as tokens are computed."""
        return False

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Return the request to preempt. The running request that arrived first is never among the candidates."""
        return max(candidates, key=lambda request: request.order)

    def yields(self, running: Sequence[Request]) -> Sequence[Request]:  # noqa: ARG002
        """Return the requests to preempt in favour of waiting ones before the step is formed, even if memory is free.

        A policy that preempts here is responsible for the progress of every request.
        """
        return ()

    def leaves(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        """Return whether a finished request gives up its row now. Called again for as long as it stays."""
        return True

    # Notifications, for policies that keep accounts.

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the shares of tenants. Called before the first request."""

    def set_num_left(self, num_left: Callable[[Request], int]) -> None:
        """Set the function that returns how many tokens of a waiting request are left to compute after prefix hits.

        Called before the first request.
        """

    def on_admit(self, request: Request) -> None:
        """Note that the request runs. Called after `remove`."""

    def on_batch(self, step: ScheduledStep) -> None:
        """Note that a step was scheduled."""


POLICIES: Registry[Callable[[], Policy]] = Registry(
    "policy",
    {
        "sequential": "inflight.scheduling.policies.baselines:Sequential",
        "static": "inflight.scheduling.policies.baselines:Static",
        "continuous": "inflight.scheduling.policies.continuous:Continuous",
        "priority": "inflight.scheduling.policies.priority:Priority",
        "fair": "inflight.scheduling.policies.fair:Fair",
    },
)


def make_policy(choice: str | Callable[[], object]) -> Policy:
    """Return a policy by its name, by `module:Class`, or from a class or function that makes one."""
    factory = POLICIES.get(choice) if isinstance(choice, str) else choice
    policy = factory()
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy {choice!r} returned a {type(policy).__name__}: it must return an inflight Policy"
        )
    return policy


# ---- token budgets ----

FIRST_TOKENS = 256  # initial estimate of the tokens that take the target time
MIN_CHUNK = 128  # tokens that prompts always get, however slow steps are
PROMPTS_AT_ONCE = 4  # prompts that may wait before steps grow
SMOOTHING = 0.5  # weight of one measurement in the estimate
MAX_GROWTH = 2.0  # limit of the estimate relative to the step that was measured


class TokenBudget:
    """Decides how many tokens a step may have. This one makes steps as large as allowed."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def limit(self, num_decodes: int, num_prompts: int) -> int:  # noqa: ARG002
        """Return the most tokens for a step with `num_decodes` decodes and `num_prompts` running or waiting prompts."""
        return self.max_tokens

    def observe(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        """Learn from the duration of a step."""


class TimedTokenBudget(TokenBudget):
    """Keeps steps with decodes to about `target` seconds. How many tokens fit is learned from measured steps.

    Long prompts make a step slow, and every decoding request waits for its end. While few prompts wait, a step
    therefore takes only as many prompt tokens as keep it within the target time. As more wait, steps grow up to the
    limit, because then throughput decides how soon the last prompt gets its first token.

    If the device rounds steps up to certain `sizes` (ascending), a step gets as many tokens as fill one of them, since
    a step between two sizes takes as long as the larger one.
    """

    def __init__(self, max_tokens: int, target: float, sizes: Sequence[int] = ()) -> None:
        super().__init__(max_tokens)
        self.target = target
        self._sizes = sizes
        self._fitting = float(FIRST_TOKENS)  # tokens that take the target time
        # Tokens and seconds of the last step without prompts: the fixed cost that dominates every step.
        self._decodes = 0, 0.0

    def limit(self, num_decodes: int, num_prompts: int) -> int:
        if not num_decodes:  # no request is waiting for its next token
            return self.max_tokens
        widened = self._fitting * max(1.0, num_prompts / PROMPTS_AT_ONCE)
        return min(self.max_tokens, self._filled(num_decodes + MIN_CHUNK, int(widened)))

    def _filled(self, least: int, most: int) -> int:
        """Return the largest size between `least` and `most`, or else `least` rounded up to a size."""
        if not self._sizes:
            return max(least, most)
        index = bisect_right(self._sizes, most) - 1
        return self._rounded(max(least, self._sizes[index] if index >= 0 else 0))

    def _rounded(self, num_tokens: int) -> int:
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else num_tokens

    def observe(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        if not has_prompts:
            self._decodes = num_tokens, seconds
        # The time of a small step is that of reading the weights: it says little about how many tokens fit.
        elif num_tokens >= self._fitting / 2 and seconds > 0:
            self._fitting += SMOOTHING * (self._estimate(self._rounded(num_tokens), seconds) - self._fitting)
            self._fitting = min(max(self._fitting, MIN_CHUNK), self.max_tokens)

    def _estimate(self, num_tokens: int, seconds: float) -> float:
        """Return how many tokens take the target time, at this step's cost per token beyond a step without prompts."""
        base_tokens, base_seconds = self._decodes
        if num_tokens <= base_tokens or seconds <= base_seconds:
            base_tokens, base_seconds = 0, 0.0
        per_token = (seconds - base_seconds) / (num_tokens - base_tokens)
        return min(num_tokens + (self.target - seconds) / per_token, MAX_GROWTH * num_tokens)


# ---- checks: they return a policy's result, or raise whatever comparing or iterating over nonsense raises ----


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

    It keeps its own set of the waiting requests. Its own queue holds the requests that the policy failed
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
