"""Scheduling policies and token budgets: the choices that the scheduler leaves open.

The scheduler enforces limits, allocates memory and guarantees progress, whatever a policy returns. A policy decides the
order of the queue, which requests are admitted and which of them ahead of running prompts, how the tokens of a step are
divided, how much memory is set aside, which request is preempted and when a finished request leaves. A token budget
decides how many tokens a step may have.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from inflight.errors import ConfigError
from inflight.registry import Registry
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep

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
