"""The engine core and its clients. It knows runners only through their protocol."""

from inflight.engine.client import (
    Command,
    EngineClient,
    Health,
    MemoryState,
    ModelFacts,
    ReplicaClient,
    RequestState,
    TimelineObserver,
)
from inflight.engine.core import EngineCore
from inflight.engine.inproc import InprocClient
from inflight.engine.runner import Runner
from inflight.engine.stats import EngineStats

__all__ = [
    "Command",
    "EngineClient",
    "EngineCore",
    "EngineStats",
    "Health",
    "InprocClient",
    "MemoryState",
    "ModelFacts",
    "ReplicaClient",
    "RequestState",
    "Runner",
    "TimelineObserver",
]
