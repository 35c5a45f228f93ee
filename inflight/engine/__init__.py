"""The loop, and handles on it. Knows runners only through their protocol."""

from inflight.engine.client import EngineClient, Health
from inflight.engine.core import EngineCore, EngineStats, StepObserver
from inflight.engine.inproc import InprocClient
from inflight.engine.runner import Runner

__all__ = ["EngineClient", "EngineCore", "EngineStats", "Health", "InprocClient", "Runner", "StepObserver"]
