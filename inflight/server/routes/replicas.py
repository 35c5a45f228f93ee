"""The engines behind the server: how each does, and for those who have the admin key, which there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.engine import EngineStats, Health
from inflight.errors import CheckpointChangedError, ConfigError, EngineError
from inflight.router import Replica, Replicas
from inflight.server.errors import ApiError
from inflight.server.openapi import documented, respond
from inflight.server.routes.schemas import ReplicaReport, ReplicaReports
from inflight.server.state import ServerState, state_of

logger = logging.getLogger(__name__)

router = APIRouter()


@router.get("/v1/replicas", **documented(None, ReplicaReports))
async def list_replicas(request: Request) -> Response:
    """How the engines do; one, where there is no router."""
    return await _list(state_of(request))


@router.post("/v1/replicas", **documented(None, ReplicaReports, 400, 503))
async def add_replica(request: Request) -> Response:
    """Start one more. The answer comes when it is ready."""
    return await _change(request, lambda replicas, _: replicas.add(), "a replica is added")


@router.post("/v1/replicas/roll", **documented(None, ReplicaReports, 400, 503))
async def roll_replicas(request: Request) -> Response:
    """Restart all, one after the other, with no request failing. The answer comes when the last one is ready. Refused
    where a replica is missing, and stopped at the first that cannot be restarted."""
    return await _change(
        request, lambda replicas, seconds: replicas.roll(seconds), "all replicas are restarted"
    )


@router.post("/v1/replicas/{replica}/drain", **documented(None, ReplicaReports, 400, 404))
async def drain_replica(request: Request) -> Response:
    """Give it no new requests."""
    replicas = _replicas(request)
    replicas.drain(_name(request))
    return await _list(state_of(request))


@router.post("/v1/replicas/{replica}/restart", **documented(None, ReplicaReports, 400, 404, 503))
async def restart_replica(request: Request) -> Response:
    """Start another engine in its place, then drain and end the old one. The answer comes when that is done. Where
    there is no room for both, the old engine is drained and ended first, unless it is that of the last replica."""
    name = _name(request)
    return await _change(
        request, lambda replicas, seconds: replicas.restart(name, seconds), f"replica {name} is restarted"
    )


@router.delete("/v1/replicas/{replica}", **documented(None, ReplicaReports, 400, 404))
async def remove_replica(request: Request) -> Response:
    """Drain it and end it. What still runs on it then goes on elsewhere."""
    name = _name(request)
    return await _change(
        request, lambda replicas, seconds: replicas.remove(name, seconds), f"replica {name} is removed"
    )


# ---- inside ----


def _replicas(request: Request) -> Replicas:
    found = state_of(request).replicas
    if found is None:
        message = "there are no replicas to change: the server was started without --replicas"
        raise ApiError(400, message, code="no_replicas")
    return found


def _name(request: Request) -> str:
    name: str = request.path_params["replica"]
    if not any(replica.replica_id == name for replica in _replicas(request).members):
        raise ApiError(404, f"there is no replica {name!r:.100}", code="replica_not_found")
    return name


async def _change(
    request: Request, change: Callable[[Replicas, float], Coroutine[Any, Any, Any]], doing: str
) -> Response:
    """Make a change to its end, be it that whoever asked for it goes away."""
    state = state_of(request)
    work = change(_replicas(request), state.options.shutdown_timeout)
    logger.info("%s, as asked for", doing)
    try:
        await asyncio.shield(asyncio.ensure_future(work))
    except CheckpointChangedError as error:
        logger.error("the replicas were not changed: %s", error)
        message = "the checkpoint has changed since the server started: to serve other weights, start another server"
        raise ApiError(400, message, code=error.code) from error
    except (EngineError, ConfigError) as error:
        logger.error("a replica could not be started: %s", error)
        message = "a replica could not be started: the log of the server says why"
        raise ApiError(503, message, code="replica_not_started") from error
    return await _list(state)


async def _list(state: ServerState) -> Response:
    if state.model.replicas is None:
        return respond(ReplicaReports(routing=None, data=[await _only_engine(state)]))
    data = [_report(replica) for replica in state.model.replicas.members]
    data += [ReplicaReport(id=name, state="starting") for name in state.model.replicas.starting]
    return respond(ReplicaReports(routing=state.options.router.routing, data=data))


async def _only_engine(state: ServerState) -> ReplicaReport:
    health = await state.model.client.health()
    report = ReplicaReport(id="0", **_life(health, health.state))
    if not health.healthy:
        return report
    stats = await state.model.client.stats()
    return report.model_copy(update=_figures(stats))


def _report(replica: Replica) -> ReplicaReport:
    figures = {} if replica.stats is None else _figures(replica.stats)
    return ReplicaReport(
        id=replica.replica_id,
        num_queued_tokens=replica.num_queued_tokens,
        **_life(replica.health, replica.state),
        **figures,
    )


def _life(health: Health, state: str) -> dict[str, Any]:
    return {
        "state": state,
        "num_restarts": health.num_restarts,
        "seconds_since_step": health.seconds_since_step,
    }


def _figures(stats: EngineStats) -> dict[str, Any]:
    return {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_usage": stats.kv.num_used / max(1, stats.kv.num_blocks),
        "num_cached_blocks": stats.kv.num_cached,
        "prefix_hit_rate": stats.num_prefix_hits / max(1, stats.num_prefix_queries),
        "num_output_tokens": stats.num_output_tokens,
    }
