"""Which hosts the server answers as.

Whoever owns a name can make it point to this machine: a page of that name may then call a server here, from the browser
of someone who only looked at it, as if the two were one site. The `Host` header still has the page's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.types import Scope

from inflight.errors import ConfigError
from inflight.server.errors import ApiError

ALL = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HEADER = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]+)(?::[0-9]{1,5})?")  # a name or an address, and perhaps a port


class Hosts:
    """Names without ports, in any spelling. `*` is all of them."""

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
