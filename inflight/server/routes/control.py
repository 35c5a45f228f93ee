"""Administration routes that vLLM's server has too: load, server info, sleep, the prefix cache."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from inflight import __version__
from inflight.engine import Command
from inflight.errors import EngineDeadError, EngineError
from inflight.server.errors import ApiError
from inflight.server.openapi import documented, respond
from inflight.server.pages import docs_page
from inflight.server.routes.schemas import Done, ServerInfo, ServerLoad, Sleeping
from inflight.server.state import ServerState, state_of

logger = logging.getLogger(__name__)

router = APIRouter()


@router.head("/docs", include_in_schema=False)
@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    """Show a page with all routes and the fields of their bodies."""
    return docs_page(request.app.openapi())


@router.get("/load", **documented(None, ServerLoad))
async def load(request: Request) -> Response:
    """Return the number of running requests."""
    state = state_of(request)
    return respond(ServerLoad(server_load=len(state.request_log) + state.num_answered_by_others()))


@router.get("/server_info", **documented(None, ServerInfo))
async def server_info(request: Request) -> Response:
    """Return the version and the engine's options, without keys. Needs the admin key."""
    state = state_of(request)
    config = {name: _serializable(value) for name, value in state.options.engine.options().items()}
    return respond(ServerInfo(version=__version__, config=config, models=list(state.model.names)))


@router.post("/reset_prefix_cache", **documented(None, Done, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache. Needs the admin key."""
    return await _command(request, "reset_prefix_cache")


@router.post("/sleep", **documented(None, Done, 400, 409, 503))
async def sleep(request: Request) -> Response:
    """Free the KV cache and move the weights to host memory until `/wake_up`. Needs the admin key."""
    level = request.query_params.get("level", "1")
    if level != "1":
        message = f"level is {level!r:.100}: it must be 1, which keeps the weights in host memory"
        raise ApiError(400, message, code="invalid_value", param="level")
    return await _command(request, "sleep")


@router.post("/wake_up", **documented(None, Done, 503))
async def wake_up(request: Request) -> Response:
    """Wake the engine after `/sleep`. Needs the admin key."""
    return await _command(request, "wake_up")


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


def _serializable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else f"{value!r:.1000}"
