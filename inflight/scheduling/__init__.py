"""Who runs in each step. No tensors, no clock: times are given, never read."""

from inflight.scheduling.batch import Admission, Batch, Sampled, TableUpdate
from inflight.scheduling.policy import POLICIES, Policy, make_policy
from inflight.scheduling.roster import Limits
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.token_budget import TimedTokenBudget, TokenBudget

__all__ = [
    "POLICIES",
    "Admission",
    "Batch",
    "Limits",
    "Policy",
    "Sampled",
    "Scheduler",
    "TableUpdate",
    "TimedTokenBudget",
    "TokenBudget",
    "make_policy",
]
