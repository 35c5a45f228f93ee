"""Policies with invalid results. Whatever they return, all requests must finish with the right tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from inflight.request import Request
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policy import Policy
from tests.support.requests import make_request


class Contrary(Policy):
    """The worst that is allowed: latest first, small bites, and always the first victim."""

    def __init__(self) -> None:
        super().__init__(headroom=0)

    def push(self, request: Request, step: int) -> None:  # noqa: ARG002
        request.order = -request.arrival
        self.queue.push(request)

    def tokens(self, request: Request, num_remaining: int, budget: int) -> int:  # noqa: ARG002
        return min(num_remaining, max(1, budget // 2))

    def tokens_ahead(self, prompts: Sequence[Request], budget: int) -> int:  # noqa: ARG002
        return budget

    def candidates_ahead(self, prompts: Sequence[Request]) -> Iterable[Request]:  # noqa: ARG002
        return self.candidates()

    def prompts(self, running: Sequence[Request]) -> Sequence[Request]:
        return running[::-1]

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[0]


class SmallBites(Continuous):
    """Looks ahead in the queue while prompts are computed a few tokens at a time."""

    def __init__(self) -> None:
        super().__init__(headroom=0)

    def tokens(self, request: Request, num_remaining: int, budget: int) -> int:  # noqa: ARG002
        return min(num_remaining, budget, 4)


class OutOfRange(Policy):
    """More than there is, and fewer than none."""

    def tokens(self, request: Request, num_remaining: int, budget: int) -> int:
        return (num_remaining, budget, num_remaining + budget, -num_remaining)[request.arrival % 4]

    def memory_to_admit(self, request: Request, running: Sequence[Request]) -> int:  # noqa: ARG002
        return (0, -5, 1 << 40)[request.arrival % 3]

    def yields(self, running: Sequence[Request]) -> Sequence[Request]:
        return [*running, *running]


class Refusing(Policy):
    """Admits no request, grants no tokens and lets none leave."""

    def admits(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        return False

    def tokens(self, request: Request, num_remaining: int, budget: int) -> int:  # noqa: ARG002
        return 0

    def leaves(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        return False


QUESTIONS = {name for name, value in vars(Policy).items() if callable(value)} - {"__init__", "__len__"}


def _answers(result: Any) -> type[Policy]:
    """A policy that answers every question with the same thing, or raises."""

    def respond(*_: object) -> Any:
        if result is RuntimeError:
            raise RuntimeError("on purpose")
        return result

    return type("Monotonous", (Policy,), dict.fromkeys(QUESTIONS, respond))


class Erratic(Policy):
    """Sometimes right, sometimes not, sometimes an exception."""

    def __init__(self, seed: int) -> None:
        super().__init__(headroom=0)
        self._random = random.Random(seed)
        self._seen: list[Any] = [make_request([1])]  # an unknown request, then all that ever arrived

    def _maybe(self, right: Any) -> Any:
        if self._random.random() < 0.7:
            return right
        if self._random.random() < 0.3:
            raise RuntimeError("on purpose")
        stranger = self._random.choice(self._seen)
        wrong: tuple[Any, ...] = (None, -1, 2.5, "x", True, 1 << 70, [], [7], self._seen, stranger)
        return self._random.choice(wrong)

    def push(self, request: Request, step: int) -> None:
        self._seen.append(request)
        self._maybe(None)
        super().push(request, step)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._maybe(None)

    def candidates(self) -> Any:
        waiting = self.queue.head(9)
        self._random.shuffle(waiting)
        for request in waiting:
            yield self._maybe(request)

    def tokens_ahead(self, prompts: Sequence[Request], budget: int) -> Any:  # noqa: ARG002
        return self._maybe(self._random.randint(0, budget))

    def candidates_ahead(self, prompts: Sequence[Request]) -> Any:  # noqa: ARG002
        return self.candidates()

    def prompts(self, running: Sequence[Request]) -> Any:
        return self._maybe(self._random.sample(running, self._random.randint(0, len(running))))

    def admits(self, request: Request, running: Sequence[Request]) -> Any:  # noqa: ARG002
        return self._maybe(self._random.random() < 0.5)

    def tokens(self, request: Request, num_remaining: int, budget: int) -> Any:  # noqa: ARG002
        return self._maybe(self._random.randint(0, min(num_remaining, budget)))

    def memory_to_admit(self, request: Request, running: Sequence[Request]) -> Any:
        return self._maybe(super().memory_to_admit(request, running))

    def allocates_at_once(self) -> Any:
        return self._maybe(self._random.random() < 0.5)

    def victim(self, candidates: Sequence[Request]) -> Any:
        return self._maybe(self._random.choice(candidates))

    def yields(self, running: Sequence[Request]) -> Any:
        return self._maybe([request for request in running if self._random.random() < 0.2])

    def leaves(self, request: Request, running: Sequence[Request]) -> Any:  # noqa: ARG002
        return self._maybe(not running)

    def on_admit(self, request: Request) -> None:  # noqa: ARG002
        self._maybe(None)

    def on_batch(self, batch: object) -> None:  # noqa: ARG002
        self._maybe(None)


HOSTILE: tuple[Callable[[], Policy], ...] = (
    Contrary,
    SmallBites,
    OutOfRange,
    Refusing,
    _answers(None),
    _answers("nonsense"),
    _answers(RuntimeError),
    *(partial(Erratic, seed) for seed in range(3)),
)
