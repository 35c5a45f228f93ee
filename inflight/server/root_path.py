"""The server under a path of a larger site: `--root-path /llm`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Takes the path's beginning off, for a proxy in front that leaves it on; one that takes it off itself may, too.

    Outermost: everything behind it sees the paths that it would see without a proxy.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root or path.startswith(f"{self._root}/"):
                scope = {**scope, "path": path[len(self._root) :] or "/"}
        await self._app(scope, receive, send)
