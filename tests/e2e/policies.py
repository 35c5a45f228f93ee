"""Policies for tests."""

from __future__ import annotations

import sys
import time
from functools import partial

from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policies.fair import Fair
from inflight.scheduling.policies.priority import Priority

SLOW = "tests.e2e.policies:SlowPolicy"
# Without headroom, requests are admitted into memory that others will need, so some are soon preempted.
GREEDY_CONTINUOUS = partial(Continuous, headroom=0)
GREEDY_PRIORITY = partial(Priority, headroom=0)
GREEDY_FAIR = partial(Fair, headroom=0)


class SlowPolicy(Continuous):
    """Takes seconds for an answer of hundreds of tokens, so that a test can end the engine in the middle of it."""

    def on_batch(self, step: ScheduledStep) -> None:  # noqa: ARG002
        time.sleep(0.005)


class AnnouncingPolicy(Continuous):
    """Says on standard error when the first step begins, for a test that interrupts it."""

    def on_batch(self, step: ScheduledStep) -> None:
        if step.step == 0:
            print("the first step", file=sys.stderr, flush=True)
