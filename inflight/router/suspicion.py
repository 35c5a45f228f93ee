"""Which request made engines die, where one did.

An engine that dies does not say why, and most of those who were on it are innocent: someone pulled a plug. But a
request that kills engines must not go from one to the next until none is left. So whoever was on an engine when it died
is under suspicion, until another engine gives it a token: what kills does so where it is computed, and does so again.

Suspicion is shared: of n suspects, each has 1/n of it. Those that the engine had taken and given no token yet are the
likely cause: where they are few, they are tried one at a time on each replica, so that the next death names its cause.
The others, who got on well with that engine for a while, have an eighth at most, and go on all at once. A request ends
when it was alone under suspicion, and before that one of a few.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

FEW = 8
MAX_DEATHS = 32  # engines that a request may outlive, whatever they died of


@dataclass(slots=True)
class Suspicion:
    """Of one request."""

    share: float = 0.0  # 1 is all of one death
    num_deaths: int = 0  # of engines that it was on

    @property
    def is_tried_alone(self) -> bool:
        return self.share > 1 / FEW

    @property
    def is_confirmed(self) -> bool:
        return self.share >= 1 + 1 / FEW or self.num_deaths >= MAX_DEATHS

    def clear(self) -> None:
        """It was given a token."""
        self.share = 0.0


class Suspect(Protocol):
    @property
    def suspicion(self) -> Suspicion: ...

    @property
    def is_taken(self) -> bool:
        """Whether the engine that it is on has said that it has it."""

    @property
    def has_token_here(self) -> bool:
        """Whether that engine has given it a token."""


def share_blame(lost: Collection[Suspect], on_trial: Suspect | None = None) -> None:
    """An engine died, and these were on it. One that was on trial there is the likely cause, whoever was beside it."""
    taken = [request for request in lost if request.is_taken]
    likely = [request for request in taken if not request.has_token_here]
    if on_trial in likely:
        likely = [request for request in likely if request is on_trial]
    for request in likely or taken:
        request.suspicion.share += 1 / len(likely) if likely else min(1 / len(taken), 1 / FEW)
    for request in taken:
        request.suspicion.num_deaths += 1
