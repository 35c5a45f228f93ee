"""Routes that list the replicas and, with the admin key, add, drain, restart and remove them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.engine.client import Health
from inflight.engine.stats import EngineStats
from inflight.errors import CheckpointChangedError, ConfigError, EngineError, shown
from inflight.router.replica import ReplicaState
from inflight.router.replicas import Replicas
from inflight.server.errors import ApiError
from inflight.server.openapi import documented, respond
from inflight.server.routes.schemas import ReplicaReport, ReplicaReports
from inflight.server.state import ServerState, state_of

logger = logging.getLogger(__name__)

router = APIRouter()


@router.get("/v1/replicas", **documented(None, ReplicaReports))
async def list_replicas(request: Request) -> Response:
    """List the engines and their state: one, or one per replica."""
    return await _list(state_of(request))


@router.post("/v1/replicas", **documented(None, ReplicaReports, 400, 503))
async def add_replica(request: Request) -> Response:
    """Start one more replica. The response comes when it is ready."""
    return await _change(request, lambda replicas, _: replicas.add(), "adding a replica")


@router.post("/v1/replicas/roll", **documented(None, ReplicaReports, 400, 503))
async def roll_replicas(request: Request) -> Response:
    """Restart all replicas one after the other without failing a request. The response comes when the last one is
    ready. Refused if a replica is missing; stops at the first one that cannot be restarted."""
    return await _change(request, lambda replicas, seconds: replicas.roll(seconds), "restarting all replicas")


@router.post("/v1/replicas/{replica}/drain", **documented(None, ReplicaReports, 400, 404))
async def drain_replica(request: Request) -> Response:
    """Send the replica no new requests."""
    replicas = _replicas(request)
    replicas.drain(_name(request))
    return await _list(state_of(request))


@router.post("/v1/replicas/{replica}/restart", **documented(None, ReplicaReports, 400, 404, 503))
async def restart_replica(request: Request) -> Response:
    """Start a new engine for the replica, then drain and stop the old one. The response comes when that is done. If
    both do not fit, the old engine is drained and stopped first, unless it is the last one."""
    name = _name(request)
    return await _change(
        request, lambda replicas, seconds: replicas.restart(name, seconds), f"restarting replica {name}"
    )


@router.delete("/v1/replicas/{replica}", **documented(None, ReplicaReports, 400, 404))
async def remove_replica(request: Request) -> Response:
    """Drain and stop the replica. Requests that are still running then continue on other replicas."""
    name = _name(request)
    return await _change(
        request, lambda replicas, seconds: replicas.remove(name, seconds), f"removing replica {name}"
    )


def _replicas(request: Request) -> Replicas:
    replicas = state_of(request).model.replicas
    if replicas is None:
        message = "there are no replicas to change: the server was started without --replicas"
        raise ApiError(400, message, code="no_replicas")
    return replicas


def _name(request: Request) -> str:
    name: str = request.path_params["replica"]
    if not any(replica.replica_id == name for replica in _replicas(request).members):
        raise ApiError(404, f"replica {shown(name)} does not exist", code="replica_not_found")
    return name


async def _change(
    request: Request, change: Callable[[Replicas, float], Coroutine[Any, Any, Any]], description: str
) -> Response:
    """Run the change to completion even if the client disconnects."""
    state = state_of(request)
    work = change(_replicas(request), state.options.shutdown_timeout)
    logger.info("%s by admin request", description)
    try:
        await asyncio.shield(asyncio.ensure_future(work))
    except CheckpointChangedError as error:
        logger.error("the replicas were not changed: %s", error)
        message = (
            "the checkpoint has changed since the server started: start another server to serve other weights"
        )
        raise ApiError(400, message, code=error.code) from error
    except (EngineError, ConfigError) as error:
        logger.error("a replica could not be started: %s", error)
        message = "a replica could not be started (details are in the server log)"
        raise ApiError(503, message, code="replica_not_started") from error
    return await _list(state)


async def _list(state: ServerState) -> Response:
    if state.model.replicas is None:
        health = await state.model.client.health()
        stats = await state.model.client.stats() if health.healthy else None
        return respond(ReplicaReports(routing=None, data=[_report("0", health, health.state, stats)]))
    data = [
        _report(item.replica_id, item.health, item.state, item.stats, item.num_queued_tokens)
        for item in state.model.replicas.members
    ]
    data += [ReplicaReport(id=name, state="starting") for name in state.model.replicas.starting]
    return respond(ReplicaReports(routing=state.options.router.routing, data=data))


def _report(
    name: str, health: Health, state: ReplicaState, stats: EngineStats | None, num_queued_tokens: int = 0
) -> ReplicaReport:
    figures: dict[str, Any] = {}
    if stats is not None:
        figures = {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_usage": stats.kv.num_used / max(1, stats.kv.num_blocks),
            "num_cached_blocks": stats.kv.num_cached,
            "prefix_hit_rate": stats.num_prefix_hits / max(1, stats.num_prefix_queries),
            "num_output_tokens": stats.num_output_tokens,
        }
    return ReplicaReport(
        id=name,
        state=state,
        num_queued_tokens=num_queued_tokens,
        num_restarts=health.num_restarts,
        seconds_since_step=health.seconds_since_step,
        **figures,
    )
