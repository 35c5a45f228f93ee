"""Answers 503 while the model loads; then the application takes over on the same socket."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.server.anthropic.errors import error_at
from inflight.server.errors import ApiError
from inflight.server.openapi import respond
from inflight.server.pages import PAGES, page_at
from inflight.server.routes.schemas import HealthStatus

RETRY_AFTER = 5  # seconds; the remaining load time is not known


class LoadingApp:
    """An application that reports that the model is loading until `open` is called."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._progress: float | None = None

    def progress(self, num_done: int, num_total: int) -> None:
        """Set how many bytes of the weights are loaded. Any thread may call this."""
        self._progress = num_done / num_total if num_total else None

    def open(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._loading(scope) if self._app is None else self._app
        await app(scope, receive, send)

    def _loading(self, scope: Scope) -> Response:
        error = ApiError(
            503,
            "the model is loading: please retry later",
            code="loading",
            retry_after=RETRY_AFTER,
        )
        if scope["path"] in PAGES and scope["method"] == "GET" and _is_browser(scope):
            page = page_at(scope["path"], error.status)
            page.headers.update(error.headers)
            return page
        if scope["path"] not in ("/health", "/ready", "/ping") or scope["method"] not in ("GET", "HEAD"):
            return error_at(scope["path"], error)
        health = HealthStatus(
            status="loading", seconds_since_step=0.0, num_running=0, num_waiting=0, progress=self._progress
        )
        response = respond(health, error.status)
        response.headers.update(error.headers)
        return response


def _is_browser(scope: Scope) -> bool:
    """Return whether the client is a browser, whose page waits until the model is loaded."""
    return "text/html" in Headers(scope=scope).get("accept", "")
