"""The policies that tests run: all that have a name, and some without headroom, so that memory runs out frequently."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from inflight.scheduling import policy
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policies.fair import Fair
from inflight.scheduling.policies.priority import Priority
from inflight.scheduling.policy import Policy

NAMES = tuple(policy.POLICIES)

POLICIES: tuple[str | Callable[[], Policy], ...] = (
    *NAMES,
    partial(Continuous, headroom=0),
    partial(Continuous, headroom=0, short=3),  # so that there are long prompts among those of a few tokens
    partial(Priority, headroom=0),
    partial(Fair, headroom=0),
)
