"""Which pages in a browser may make the server do something."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

from inflight.server.errors import ApiError

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
