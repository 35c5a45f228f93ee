"""Who runs in each step. No tensors, no clock: times are given, never read."""

from inflight.scheduling.batch import Admission, Batch, Sampled, TableUpdate
from inflight.scheduling.pace import Pace, TimedPace
from inflight.scheduling.policy import POLICIES, Policy, make_policy
from inflight.scheduling.roster import Limits
from inflight.scheduling.scheduler import Scheduler

__all__ = [
    "POLICIES",
    "Admission",
    "Batch",
    "Limits",
    "Pace",
    "Policy",
    "Sampled",
    "Scheduler",
    "TableUpdate",
    "TimedPace",
    "make_policy",
]
