"""Decides which requests run in each step. No tensors and no clock: times are passed in."""

from inflight.kv import StateCopy, TableUpdate
from inflight.scheduling.batch import (
    Admission,
    Batch,
    Capture,
    Sampled,
    ScheduledStep,
)
from inflight.scheduling.policy import HEADROOM, POLICIES, Policy, TimedTokenBudget, TokenBudget, make_policy
from inflight.scheduling.request_pool import Limits, RequestPool
from inflight.scheduling.scheduler import Scheduler

__all__ = [
    "HEADROOM",
    "POLICIES",
    "Admission",
    "Batch",
    "Capture",
    "Limits",
    "Policy",
    "RequestPool",
    "Sampled",
    "ScheduledStep",
    "Scheduler",
    "StateCopy",
    "TableUpdate",
    "TimedTokenBudget",
    "TokenBudget",
    "make_policy",
]
