"""Health checks, metrics, and the pages for browsers."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from inflight.engine import EngineStats
from inflight.errors import EngineError
from inflight.server.observability.metrics import CONTENT_TYPE, with_counts
from inflight.server.openapi import documented, respond
from inflight.server.pages import page_at
from inflight.server.routes.schemas import HealthStatus
from inflight.server.state import ServerState, state_of

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
async def health(request: Request) -> Response:
    """Return 200 while the engine is idle or makes progress; 503 when it hangs, is dead, or the server shuts down."""
    return await _health(state_of(request), is_readiness=False)


@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping", **documented(None, HealthStatus, 503))
async def ping(request: Request) -> Response:
    """Return the same as `/health`."""
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
    content = counts.render(await _stats(state), num_restarts, callers, replicas)
    return Response(content, media_type=CONTENT_TYPE)


@router.head("/", include_in_schema=False)
@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """Show a page to chat with the model."""
    return page_at("/")


@router.head("/replicas", include_in_schema=False)
@router.get("/replicas", response_class=HTMLResponse)
async def replicas_page() -> Response:
    """Show a page with the state of the engines."""
    return page_at("/replicas")
