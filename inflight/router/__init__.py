"""Several engines as one: requests are routed to replicas, and continue elsewhere when an engine dies."""

from inflight.router.replica import Replica
from inflight.router.replicas import Replicas
from inflight.router.router import Router
from inflight.router.start import start_router

__all__ = ["Replica", "Replicas", "Router", "start_router"]
