"""Middleware before every route: request ids and the access log, and checks of host, origin and API key."""

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

from inflight.errors import ConfigError, shown
from inflight.logs import request_id as current_request_id
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError, error_response, is_anthropic, of_exception
from inflight.server.http.bodies import PacedSend
from inflight.server.pages import PAGES

if TYPE_CHECKING:
    from inflight.server.state import ServerState

logger = logging.getLogger("inflight.access")

# Open without a key: health checks, and pages that contain no data of the server.
OPEN = frozenset({"/health", "/ready", "/ping", *PAGES})

ADMIN = "/v1/replicas"  # and below: reading needs an API key, changing needs the admin key
SHOWING = frozenset({"/v1/steps", "/v1/requests", "/v1/memory", "/v1/trace"})  # the admin key sees everyone's
REPORT = "/v1/requests/"  # followed by an id: the admin key sees everyone's, and changes none
UNLOGGED = frozenset({"/health", "/ready", "/ping", "/metrics"})  # polled all the time
ADMIN_ALONE = frozenset({"/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/server_info"})

ALL = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]+)(?::[0-9]{1,5})?")  # a name or an address, with an optional port


class AccessMiddleware:
    """Checks every request and logs it. The path checked is the path routed: nothing rewrites it in between."""

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
        answer: dict[str, Any] = {"status": 0, "id": name}

        def on_start(message: Message) -> None:
            answer["status"] = message["status"]
            self._name(message, answer, b"request-id" if is_anthropic(scope) else None)

        paced = PacedSend(scope, send, self._state.unsent, on_start)
        try:
            self._state.hosts.check(scope)
            self._origins.check(scope)
            scope["inflight.caller"] = self._caller(scope)
        except ApiError as error:
            scope["inflight.caller"] = None
            self._state.metrics.refused[error.code or "denied"] += 1
            await error_response(scope, error)(scope, receive, paced)
        else:
            await self._pass(scope, receive, paced, answer)
        self._log(scope, answer, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: PacedSend, answer: dict[str, Any]) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            # Starlette has logged it and answered if it could.
            if not answer["status"]:
                await error_response(scope, of_exception(error))(scope, receive, send)
        finally:
            send.close()
            if send.refusal is not None:
                self._state.metrics.refused[send.refusal.code or "denied"] += 1

    def _caller(self, scope: Scope) -> Caller:
        if scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):
            return Caller()
        headers = Headers(scope=scope)
        keys, authorization = self._state.keys, headers.get("authorization")
        if scope["path"] in ADMIN_ALONE and scope["method"] != "OPTIONS":
            keys.check_admin(authorization)
            return Caller()
        if scope["path"].startswith(ADMIN):
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                keys.check_admin(authorization)
                return Caller()
            if keys.is_admin(authorization):
                return Caller()
        if shows(scope) and keys.is_admin(authorization):
            return Caller(is_admin=True)
        return keys.find(authorization, headers.get("x-api-key"))

    def _name(self, message: Message, answer: dict[str, Any], also: bytes | None) -> None:
        """Make sure that the response has a request id: its own, or the one used in the log. `also` names a second
        header for it, which clients of some APIs expect."""
        headers = message.setdefault("headers", [])
        own_id = next((value for key, value in headers if key == b"x-request-id"), None)
        if own_id is not None:
            answer["id"] = own_id.decode("latin-1")
        else:
            message["headers"] = [*headers, (b"x-request-id", answer["id"].encode())]
        if also is not None:
            message["headers"] = [*message["headers"], (also, answer["id"].encode())]

    def _log(self, scope: Scope, answer: dict[str, Any], seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")
        status = str(answer["status"] or 499)  # the client disconnected before there was an answer
        self._state.metrics.responses[path, status] += 1
        if self._state.options.log_requests and scope["path"] not in UNLOGGED:
            caller: Caller | None = scope["inflight.caller"]
            logger.info(
                "%s %.200r %s in %.3f s",
                *(scope["method"], scope["path"], status, seconds),
                extra={
                    "request_id": answer["id"],
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": int(status),
                    "seconds": round(seconds, 6),
                    "key": caller.name if caller is not None else None,
                },
            )


def shows(scope: Scope) -> bool:
    """Return whether an HTTP request only shows requests, which the admin key may see whoever sent them."""
    is_read = scope["method"] in ("GET", "HEAD")
    return scope["path"] in SHOWING or (is_read and scope["path"].startswith(REPORT))


class Hosts:
    """The host names that the server answers to, without ports; `*` allows all.

    This prevents DNS rebinding: a web page whose name is made to resolve to this machine could otherwise call the
    server from the browser of any visitor, as if both were one site. The `Host` header still has the page's name.
    """

    def __init__(self, allowed: Iterable[str] = (ALL,)) -> None:
        names = list(allowed)
        for name in names:
            if name != ALL and not _is_name(name):
                raise ConfigError(
                    f"allowed_hosts has {name!r}: it must be a name or an address without a port, or * for all"
                )
        self._names = None if ALL in names else frozenset(map(_canonical, names))

    @classmethod
    def for_server(cls, allowed: tuple[str, ...], host: str, bound: str, has_keys: bool) -> Hosts:
        """Return the allowed hosts: by default all, except for a server without keys on a loopback address.

        `host` is the configured host, and `bound` the address that it resolved to.
        """
        if allowed:
            return cls(allowed)
        if has_keys or not ip_address(bound.partition("%")[0]).is_loopback:
            return cls()
        return cls((*LOOPBACK, host, bound))

    def check(self, scope: Scope) -> None:
        """Raise ApiError unless the request has exactly one `Host` header with an allowed host."""
        if self._names is None:
            return
        hosts = [value.decode("latin-1").strip(" \t") for name, value in scope["headers"] if name == b"host"]
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None or _canonical(match[1]) not in self._names:
            what = (
                f"the host {shown(hosts[0])}"
                if len(hosts) == 1
                else f"a request with {len(hosts)} Host headers"
            )
            message = f"{what} is not allowed: --allowed-hosts sets the host names to accept (* accepts all)"
            raise ApiError(403, message, code="host_not_allowed")


def _canonical(name: str) -> str:
    """Return the canonical spelling: lower case, no final dot, addresses compressed and without brackets."""
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
    """Strips the root path for a proxy that does not strip it.

    It is outermost, so that everything else sees the same paths as without a proxy.
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


# They change nothing, and without CORS a page cannot read the response.
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SAME_SITE = ("same-origin", "none")  # a page of this server, or an address typed by the user


class Origins:
    """The origins whose pages may change something: those allowed for CORS, and the server's own.

    Browsers send some cross-site requests without a CORS preflight. They name the origin in headers that a page cannot
    set; clients other than browsers send neither header.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def check(self, scope: Scope) -> None:
        """Raise ApiError for a request made by a page of another site."""
        if scope["method"] in _SAFE_METHODS or ALL in self._allowed:
            return
        headers = Headers(scope=scope)
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site")
        if origins and self._allowed.issuperset(origins):
            return
        if site is None:
            is_own = all(self._is_own(origin, headers.get("host", "")) for origin in origins)
        else:  # behind a proxy the Host header may differ, but the browser knows what it called
            is_own = site.lower() in _SAME_SITE
        if not is_own:
            what = f"the origin {shown(origins[0])}" if origins else "a cross-site request"
            message = f"{what} is not allowed: --allowed-origins sets the origins to accept"
            raise ApiError(403, message, code="origin_not_allowed")

    @staticmethod
    def _is_own(origin: str, host: str) -> bool:
        return origin.partition("://")[2].lower() == host.strip(" \t").lower() != ""
