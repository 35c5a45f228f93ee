"""Health checks, metrics, the pages for browsers, and administration: load, server info, sleep, the prefix cache."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from inflight import __version__
from inflight.engine.client import Command, ResetPrefixCache, Sleep, WakeUp
from inflight.engine.stats import EngineStats
from inflight.errors import EngineDeadError, EngineError, shown
from inflight.server.errors import ApiError, invalid
from inflight.server.observability.metrics import CONTENT_TYPE, exposition, with_counts
from inflight.server.openapi import documented, respond
from inflight.server.pages import PAGES, application_page
from inflight.server.routes.schemas import Done, HealthStatus, ServerInfo, ServerLoad, Sleeping
from inflight.server.state import ServerState, state_of

logger = logging.getLogger(__name__)

router = APIRouter()


async def _stats(state: ServerState) -> EngineStats | None:
    try:
        return await state.model.client.stats()
    except EngineError:
        return None


async def _health(state: ServerState, is_readiness: bool) -> Response:
    health = await state.model.client.health()
    stats = await _stats(state) if health.healthy else None
    waiting = stats.num_waiting if stats is not None else 0
    status: str = "ok" if health.healthy else health.state
    if state.draining:
        status = "draining"
    elif is_readiness and status == "ok" and stats is not None and stats.is_sleeping:
        status = "sleeping"
    elif is_readiness and status == "ok" and waiting >= state.model.max_waiting:
        status = "queue full"
    report = HealthStatus(
        status=status,
        seconds_since_step=health.seconds_since_step,
        num_running=stats.num_running if stats is not None else 0,
        num_waiting=waiting,
        degraded=_degraded(state),
    )
    return respond(report, 200 if status == "ok" else 503)


def _degraded(state: ServerState) -> list[str]:
    """Describe the replicas that are not running."""
    replicas = [] if state.model.replicas is None else state.model.replicas.members
    return [f"replica {item.replica_id} is {item.state}" for item in replicas if item.state != "running"]


@router.head("/health", include_in_schema=False)
@router.get("/health", **documented(None, HealthStatus, 503))
@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping", **documented(None, HealthStatus, 503))
async def health(request: Request) -> Response:
    """Return 200 while the engine is idle or makes progress; 503 when it hangs, is dead, or the server shuts down."""
    return await _health(state_of(request), is_readiness=False)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", **documented(None, HealthStatus, 503))
async def ready(request: Request) -> Response:
    """Return 200 while a request sent now would be accepted."""
    return await _health(state_of(request), is_readiness=True)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus format."""
    state = state_of(request)
    num_restarts = (await state.model.client.health()).num_restarts
    replicas = [] if state.model.replicas is None else state.model.replicas.members
    counts, callers = state.metrics, state.keys.callers
    if state.counts_of_others is not None:
        counts, callers = with_counts(counts, callers, await state.counts_of_others())
    async with state.exposing:
        families = counts.families(await _stats(state), num_restarts, callers, replicas)
        content = await asyncio.to_thread(exposition, families)
    return Response(content, media_type=CONTENT_TYPE)


async def page() -> Response:
    """Show the web application: chat, timeline, requests, memory, replicas and API reference."""
    return application_page()


for path in PAGES:
    router.add_api_route(
        path, page, methods=["GET"], response_class=HTMLResponse, include_in_schema=path == "/"
    )
    router.add_api_route(path, page, methods=["HEAD"], include_in_schema=False)


# ---- administration ----


@router.get("/load", **documented(None, ServerLoad))
async def load(request: Request) -> Response:
    """Return the number of running requests."""
    state = state_of(request)
    return respond(ServerLoad(server_load=len(state.request_log) + state.num_answered_by_others()))


@router.get("/server_info", **documented(None, ServerInfo))
async def server_info(request: Request) -> Response:
    """Return the version and the engine's options, without keys. Needs the admin key."""
    state = state_of(request)
    config: dict[str, Any] = {
        name: value if isinstance(value, str | int | float | bool | None) else shown(value, 1000)
        for name, value in state.options.engine.options().items()
    }
    return respond(ServerInfo(version=__version__, config=config, models=list(state.model.names)))


@router.post("/reset_prefix_cache", **documented(None, Done, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache. Needs the admin key."""
    return await _command(request, ResetPrefixCache())


@router.post("/sleep", **documented(None, Done, 400, 409, 503))
async def sleep(request: Request) -> Response:
    """Free the KV cache and move the weights to host memory until `/wake_up`. Needs the admin key."""
    level = request.query_params.get("level", "1")
    if level != "1":
        raise invalid(
            "level", f"level is {shown(level)}: it must be 1, which keeps the weights in host memory"
        )
    return await _command(request, Sleep())


@router.post("/wake_up", **documented(None, Done, 503))
async def wake_up(request: Request) -> Response:
    """Wake the engine after `/sleep`. Needs the admin key."""
    return await _command(request, WakeUp())


@router.get("/is_sleeping", **documented(None, Sleeping, 503))
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine is asleep. Needs the admin key."""
    stats = await state_of(request).model.client.stats()
    return respond(Sleeping(is_sleeping=stats.is_sleeping))


async def _command(request: Request, command: Command) -> Response:
    state: ServerState = state_of(request)
    logger.info("running the admin command %s", command)
    try:
        await state.model.client.command(command)
    except EngineDeadError:
        raise
    except EngineError as error:
        if error.code == "cannot_sleep":
            raise ApiError(400, str(error), code="cannot_sleep") from None
        raise ApiError(409, str(error), code="engine_busy") from None
    return respond(Done())
