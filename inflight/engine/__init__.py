"""The engine core and its clients. It knows runners only through their protocol."""

from inflight.engine.client import EngineClient, Health, ModelFacts, ReplicaClient, RequestState
from inflight.engine.core import EngineCore, RequestFeed
from inflight.engine.inproc import InprocClient
from inflight.engine.runner import Runner
from inflight.engine.sleep import Command
from inflight.engine.stats import EngineStats
from inflight.engine.step_records import StepObserver

__all__ = [
    "Command",
    "EngineClient",
    "EngineCore",
    "EngineStats",
    "Health",
    "InprocClient",
    "ModelFacts",
    "ReplicaClient",
    "RequestFeed",
    "RequestState",
    "Runner",
    "StepObserver",
]
