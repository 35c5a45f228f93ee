"""What every request passes before any route: an id for the logs, the host it is for, the page it is from, its key."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.errors import ConfigError
from inflight.logs import request_id as current_request_id
from inflight.server.access.keys import Caller
from inflight.server.error_shapes import error_at, is_anthropic
from inflight.server.errors import ApiError, of_exception
from inflight.server.http.unsent import PacedSend

if TYPE_CHECKING:
    from inflight.server.state import ServerState

logger = logging.getLogger("inflight.access")

# Open to all: what a load balancer asks, and pages that hold nothing of the server's.
OPEN = frozenset({"/health", "/ready", "/ping", "/", "/replicas"})

ADMIN = "/v1/replicas"  # and below: to look needs a key, to change needs the admin key
ADMIN_ALONE = frozenset({"/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/server_info"})

ALL = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HEADER = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]+)(?::[0-9]{1,5})?")  # a name or an address, and perhaps a port


class AccessMiddleware:
    """The path that is checked here is the path that is routed: nothing rewrites it in between."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._origins = Origins(state.options.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        name = f"req-{secrets.token_hex(8)}"
        current_request_id.set(name)
        seen: dict[str, Any] = {"status": 0, "id": name}

        def started_with(message: Message) -> None:
            seen["status"] = message["status"]
            self._name(message, seen, b"request-id" if is_anthropic(scope["path"]) else None)

        paced = PacedSend(scope, send, self._state.unsent, started_with)
        try:
            self._state.hosts.check(scope)
            self._origins.check(scope)
            scope["inflight.caller"] = self._caller(scope)
        except ApiError as error:
            scope["inflight.caller"] = None
            self._state.metrics.refused[error.code or "denied"] += 1
            await error_at(scope["path"], error)(scope, receive, paced)
        else:
            await self._pass(scope, receive, paced, seen)
        self._log(scope, seen, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: PacedSend, seen: dict[str, Any]) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            # The framework has logged it and answered, where it could; here it ends.
            if not seen["status"]:
                await error_at(scope["path"], of_exception(error))(scope, receive, send)
        finally:
            send.close()
            if send.refusal is not None:
                self._state.metrics.refused[send.refusal.code or "denied"] += 1

    def _caller(self, scope: Scope) -> Caller:
        if scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):
            return Caller()
        headers = Headers(scope=scope)
        if scope["path"] in ADMIN_ALONE and scope["method"] != "OPTIONS":
            self._state.admin_key.check(headers.get("authorization"))
            return Caller()
        if scope["path"].startswith(ADMIN):
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                self._state.admin_key.check(headers.get("authorization"))
                return Caller()
            if self._state.admin_key.matches(headers.get("authorization")):
                return Caller()
        return self._state.keys.find(headers.get("authorization"), headers.get("x-api-key"))

    def _name(self, message: Message, seen: dict[str, Any], also: bytes | None) -> None:
        """Every response has an id: its own, or the one that its line in the log has. `also` is another header for it,
        which clients of some APIs look for."""
        headers = message.setdefault("headers", [])
        given = next((value for key, value in headers if key == b"x-request-id"), None)
        if given is not None:
            seen["id"] = given.decode("latin-1")
        else:
            message["headers"] = [*headers, (b"x-request-id", seen["id"].encode())]
        if also is not None:
            message["headers"] = [*message["headers"], (also, seen["id"].encode())]

    def _log(self, scope: Scope, seen: dict[str, Any], seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")
        status = str(seen["status"] or 499)  # the client went away before there was an answer
        self._state.metrics.responses[path, status] += 1
        if self._state.options.log_requests and scope["path"] not in (
            "/health",
            "/ready",
            "/ping",
            "/metrics",
        ):
            caller: Caller | None = scope["inflight.caller"]
            logger.info(
                "%s %.200r %s in %.3f s",
                *(scope["method"], scope["path"], status, seconds),
                extra={
                    "request_id": seen["id"],
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": int(status),
                    "seconds": round(seconds, 6),
                    "key": caller.name if caller is not None else None,
                },
            )


class Hosts:
    """Which hosts the server answers as: names without ports, in any spelling. `*` is all of them.

    Whoever owns a name can make it point to this machine: a page of that name may then call a server here, from the
    browser of someone who only looked at it, as if the two were one site. The `Host` header still has the page's name.
    """

    def __init__(self, allowed: Iterable[str] = (ALL,)) -> None:
        names = list(allowed)
        for name in names:
            if name != ALL and not _is_name(name):
                raise ConfigError(
                    f"allowed_hosts has {name!r}: it must be names or addresses without a port, or * for all"
                )
        self._names = None if ALL in names else frozenset(map(_canonical, names))

    @classmethod
    def for_server(cls, allowed: tuple[str, ...], host: str, bound: str, has_keys: bool) -> Hosts:
        """Those allowed; unless told, all but for a server of this machine alone that asks no one for a key.
        `host` is what was asked for, `bound` the address that it stands for."""
        if allowed:
            return cls(allowed)
        if has_keys or not ip_address(bound.partition("%")[0]).is_loopback:
            return cls()
        return cls((*LOOPBACK, host, bound))

    def check(self, scope: Scope) -> None:
        """Raises ApiError unless the request says, once, that it is for an allowed host."""
        if self._names is None:
            return
        given = [value.decode("latin-1").strip(" \t") for name, value in scope["headers"] if name == b"host"]
        found = _HEADER.fullmatch(given[0]) if len(given) == 1 else None
        if found is None or _canonical(found[1]) not in self._names:
            what = f"the host {given[0]!r:.100}" if len(given) == 1 else f"a request with {len(given)} hosts"
            message = f"{what} is not answered here: --allowed-hosts names those that are, * is all"
            raise ApiError(403, message, code="host_not_allowed")


def _canonical(name: str) -> str:
    """One spelling of each: small letters, no dot at the end, addresses without brackets and as short as they get."""
    name = name.lower().removesuffix(".")
    try:
        return str(ip_address(name[1:-1] if name.startswith("[") else name))
    except ValueError:
        return name


def _is_name(text: str) -> bool:
    try:
        ip_address(text.strip("[]"))
    except ValueError:
        return re.fullmatch(r"[\w.-]+", text) is not None
    return True


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


ALL = "*"
_SAFE = ("GET", "HEAD", "OPTIONS")  # they change nothing, and without CORS a page cannot read the answer
_OWN = ("same-origin", "none")  # the page of this server, or someone who typed the address


class Origins:
    """The origins allowed for CORS, and the server's own.

    A browser sends some requests of any page without asking the server first. It says whose they are, in headers that a
    page cannot set; clients that are no browser send neither of the two.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def check(self, scope: Scope) -> None:
        """Raises ApiError for a request that a page of another site makes."""
        if scope["method"] in _SAFE or ALL in self._allowed:
            return
        headers = Headers(scope=scope)
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site")
        if origins and self._allowed.issuperset(origins):
            return
        if site is None:
            is_own = all(self._is_own(origin, headers.get("host", "")) for origin in origins)
        else:  # the host may be another, behind a proxy; the browser knows the one that it called
            is_own = site.lower() in _OWN
        if not is_own:
            what = f"the origin {origins[0]!r:.100}" if origins else "a page of another site"
            message = f"{what} may not call this server: --allowed-origins names those that may"
            raise ApiError(403, message, code="origin_not_allowed")

    @staticmethod
    def _is_own(origin: str, host: str) -> bool:
        return origin.partition("://")[2].lower() == host.strip(" \t").lower() != ""
