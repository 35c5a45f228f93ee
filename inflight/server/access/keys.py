"""API keys and the admin key: who a caller is, what limits it has, what it has used, and whether it is admitted."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from inflight.errors import ConfigError
from inflight.events import RequestRecord
from inflight.option import read_yaml
from inflight.request import RequestContext
from inflight.server.errors import ApiError
from inflight.server.schemas import EngineBody

_FIELDS = {"name", "key", "key_env", "weight", "requests_per_minute", "max_concurrent", "cache"}
MAX_NAME = 64


@dataclass(eq=False, slots=True)
class KeyUsage:
    """The usage of one key since the start. Tokens count as they are generated, even if the request is cut short."""

    num_requests: int = 0  # admitted generation requests
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float = 0.0

    def add_request(self, num_prompt_tokens: int) -> None:
        """Count a queued request and the prompt tokens of all its answers."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def add_queue_time(self, record: RequestRecord | None, seconds: float) -> None:
        """Add the queue time of a finished answer; `seconds` is its whole time if there is no record."""
        if record is None:
            self.queue_seconds += seconds
        elif (
            queue_end := record.finished_at if record.admitted_at is None else record.admitted_at
        ) is not None:
            self.queue_seconds += queue_end - record.arrived_at


@dataclass(eq=False)
class Caller:
    """The owner of a key, with its limits and usage."""

    name: str = ""  # empty without keys, and for keys without a name
    weight: float = 1.0
    requests_per_minute: float | None = None
    max_concurrent: int | None = None
    own_cache: bool = False  # cached prefixes are not shared: timing reveals nothing about its prompts
    is_admin: bool = False  # sees the requests of all callers
    clock: Callable[[], float] = time.monotonic
    num_running: int = 0
    usage: KeyUsage = field(default_factory=KeyUsage)
    _allowance: float = field(default=0.0, init=False)
    _counted_at: float = field(default=-math.inf, init=False)

    def context(self, body: EngineBody, user: str | None) -> RequestContext:
        """Return the context of a request; `user` is who fair scheduling charges if the key has no name.

        The salt is hashed, so that no client can choose that of another key's cached prefixes.
        """
        owner, salt = self.name if self.own_cache else "", body.cache_salt or ""
        if owner or salt:
            salt = hashlib.sha256(f"{owner}\0{salt}".encode()).hexdigest()
        return RequestContext(body.priority or 0, self.name or user or "", salt)

    def enter(self) -> None:
        """Count one more request. Raises ApiError if a limit is reached."""
        if self.max_concurrent is not None and self.num_running >= self.max_concurrent:
            raise ApiError(
                429,
                f"this key has {self.num_running} running requests: at most {self.max_concurrent} are allowed",
                code="concurrency_limit_exceeded",
                retry_after=1,
            )
        if self.requests_per_minute is not None:
            self._take_from_allowance(self.requests_per_minute)
        self.num_running += 1

    def leave(self) -> None:
        self.num_running -= 1

    def _take_from_allowance(self, per_minute: float) -> None:
        """Take a token from a bucket that holds a minute's requests and refills evenly."""
        now = self.clock()
        full = max(per_minute, 1.0)
        self._allowance = min(full, self._allowance + (now - self._counted_at) * per_minute / 60)
        self._counted_at = now
        if self._allowance < 1:
            wait = math.ceil((1 - self._allowance) * 60 / per_minute)
            raise ApiError(
                429,
                f"this key may send {per_minute:g} requests per minute: the next one is allowed in {wait} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        self._allowance -= 1


@dataclass(frozen=True, slots=True)
class KeyDigests:
    """Keys in the form that API workers get, which does not reveal them."""

    secret: bytes
    callers: Sequence[tuple[bytes, str, bool]]  # digest, name, own_cache
    admin: bytes | None = None  # digest of the admin key, with which all requests may be seen


class Keys:
    """Finds the caller of a key. Without keys, everyone is the same caller."""

    def __init__(self, callers: Iterable[tuple[str, Caller]] = ()) -> None:
        # Keys are compared by a digest with a random secret, so that timing reveals nothing about them.
        self._secret = secrets.token_bytes(32)
        self._callers = {self._digest(key): caller for key, caller in callers}
        self._everyone = Caller()
        self._admin: bytes | None = None  # digest of the admin key

    def set_admin(self, key: str | None) -> None:
        """Set the key for administration (replicas, sleep, the prefix cache), which also sees everyone's requests."""
        if key is None:
            return
        if not _can_be_sent(key):
            raise ConfigError(
                "admin_key is empty, has surrounding spaces, or has characters that are not printable ASCII"
            )
        if self._digest(key) in self._callers:
            raise ConfigError("admin_key is also an API key: it must be different")
        self._admin = self._digest(key)

    def is_admin(self, authorization: str | None) -> bool:
        """Return whether an `Authorization` header has the admin key."""
        scheme, _, key = (authorization or "").partition(" ")
        if self._admin is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(self._digest(key.strip()), self._admin)

    def check_admin(self, authorization: str | None) -> None:
        """Raise ApiError unless the header has the admin key."""
        if self._admin is None:
            message = "this route needs the admin key, and the server was started without --admin-key"
            raise ApiError(403, message, code="admin_disabled")
        if not self.is_admin(authorization):
            message = "this route needs the admin key: send it as 'Authorization: Bearer ADMIN_KEY'"
            raise _denied(message, "invalid_admin_key")

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")

    @property
    def required(self) -> bool:
        return bool(self._callers)

    @property
    def callers(self) -> list[Caller]:
        return list(self._callers.values()) or [self._everyone]

    def named(self, name: str) -> Caller:
        """Return the caller with this name; all keys without a name belong to one caller."""
        return next(caller for caller in self.callers if caller.name == name)

    def digests(self) -> KeyDigests:
        """Return what another process needs to find callers by their keys."""
        callers = [(digest, caller.name, caller.own_cache) for digest, caller in self._callers.items()]
        return KeyDigests(self._secret, callers, self._admin)

    @classmethod
    def from_digests(cls, digests: KeyDigests) -> Keys:
        """Return the same callers, without their limits and usage."""
        keys = cls()
        keys._secret, keys._admin = digests.secret, digests.admin
        by_name = {name: Caller(name, own_cache=own_cache) for _, name, own_cache in digests.callers}
        keys._callers = {digest: by_name[name] for digest, name, _ in digests.callers}
        return keys

    def weights(self) -> dict[str, float]:
        """Return the weights of named callers, for fair scheduling."""
        return {caller.name: caller.weight for caller in self._callers.values() if caller.name}

    def find(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Return the caller of an `Authorization` header or else of `x-api-key`, which Anthropic clients send.

        Raises ApiError if the key is missing or unknown.
        """
        if not self._callers:
            return self._everyone
        credentials = f"Bearer {api_key or ''}" if authorization is None else authorization
        scheme, _, key = credentials.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _denied(
                "an API key is required: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                "missing_api_key",
            )
        key_digest = self._digest(key.strip())
        match = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, key_digest):
                match = caller  # no break: all keys take the same time
        if match is None:
            raise _denied("the API key is not valid for this server", "invalid_api_key")
        return match


def _denied(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


# ---- admission ----


class AdmissionControl(Protocol):
    """Counts requests. `request_id` is None for short calls that are not listed under /v1/requests."""

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        """Count one more request. Raises ApiError if the key's limit is reached or the id is in use."""

    def leave(self, caller: Caller, request_id: str | None) -> None:
        """End a request that had entered."""


class LocalAdmission:
    """Counts in this process: that of a single-process server, or the one that counts for several API workers."""

    def __init__(self) -> None:
        self._running: set[tuple[str, str]] = set()

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        caller.enter()
        if request_id is None:
            return
        if (caller.name, request_id) in self._running:
            caller.leave()
            message = f"request_id is {request_id!r}: a request with this id is already running"
            raise ApiError(400, message, code="request_id_in_use", param="request_id")
        self._running.add((caller.name, request_id))

    def leave(self, caller: Caller, request_id: str | None) -> None:
        caller.leave()
        if request_id is not None:
            self._running.discard((caller.name, request_id))


@asynccontextmanager
async def counted(admission: AdmissionControl, caller: Caller) -> AsyncGenerator[None]:
    """Count a request while the context is open. Raises ApiError if the key's limit is reached."""
    if caller.is_admin:  # it has no limits
        yield
        return
    await admission.enter(caller, None)
    try:
        yield
    finally:
        admission.leave(caller, None)


class Turns:
    """Lets each caller do one thing at a time, where many at once would delay the requests of others."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, bool], asyncio.Lock] = WeakValueDictionary()

    def lock_of(self, caller: Caller) -> asyncio.Lock:
        """Return the lock to hold meanwhile."""
        return self._locks.setdefault((caller.name, caller.is_admin), asyncio.Lock())


# ---- the keys file ----


def load_keys(api_keys: Iterable[str], file: str | None) -> Keys:
    """Return the keys from flags, which belong to one caller, and from a file, where each has a name."""
    shared = Caller()
    entries = [(key, shared) for key in api_keys]
    if file is not None:
        entries += _read_file(Path(file))
        names = [caller.name for _, caller in entries if caller.name]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{file} has two keys with the name {name!r}")
    keys = [key for key, _ in entries]
    for number, (key, caller) in enumerate(entries, 1):
        if not _can_be_sent(key):
            which = f"the key of {caller.name!r}" if caller.name else f"API key {number}"
            raise ConfigError(
                f"{which} has surrounding spaces or characters that are not printable ASCII: no client could send it"
            )
    if len(set(keys)) < len(keys):
        raise ConfigError("the same API key is listed twice")
    return Keys(entries)


def _can_be_sent(key: str) -> bool:
    """Return whether a header can carry the key: surrounding spaces get lost, and only ASCII has one encoding."""
    return key.isascii() and key.isprintable() and key == key.strip() != ""


def _read_file(path: Path) -> list[tuple[str, Caller]]:
    content = read_yaml(path, "the keys file")
    entries = content.get("keys") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"the keys file {str(path)!r} must have 'keys', a list with at least one key")
    return [_read_entry(f"key {number} of {path}", entry) for number, entry in enumerate(entries, 1)]


def _read_entry(where: str, entry: Any) -> tuple[str, Caller]:
    if not isinstance(entry, dict) or set(entry) - _FIELDS:
        raise ConfigError(f"{where} must be a mapping whose only fields are {', '.join(sorted(_FIELDS))}")
    name = entry.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ConfigError(f"{where} has the name {name!r}: it must have 1 to {MAX_NAME} characters")
    caller = Caller(
        name=name,
        weight=_positive(where, "weight", entry.get("weight", 1.0)),
        own_cache=_cache(where, entry.get("cache", "own")),
    )
    if entry.get("requests_per_minute") is not None:
        caller.requests_per_minute = _positive(where, "requests_per_minute", entry["requests_per_minute"])
    if entry.get("max_concurrent") is not None:
        caller.max_concurrent = math.ceil(_positive(where, "max_concurrent", entry["max_concurrent"]))
    return _secret(where, entry), caller


def _secret(where: str, entry: dict[str, Any]) -> str:
    if ("key" in entry) == ("key_env" in entry):
        raise ConfigError(f"{where} must have either 'key' or 'key_env' (the variable that holds the key)")
    key = entry["key"] if "key" in entry else os.environ.get(str(entry["key_env"]))
    if not isinstance(key, str) or not key.strip():
        raise ConfigError(f"{where} has no key: it must be a non-empty string")
    return key


def _positive(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {name} is {value!r}: it must be a positive number")
    return float(value)


def _cache(where: str, value: Any) -> bool:
    if value not in ("own", "shared"):
        raise ConfigError(f"{where}: cache is {value!r}: it must be own or shared")
    return bool(value == "own")
