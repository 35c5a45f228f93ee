"""Who may call, how much, and as whom; and what each has used."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.events import RequestRecord
from inflight.option import read_yaml
from inflight.server.errors import ApiError

_FIELDS = {"name", "key", "key_env", "weight", "requests_per_minute", "max_concurrent", "cache"}
MAX_NAME = 64


@dataclass(eq=False, slots=True)
class KeyUsage:
    """Of one key since the start. Tokens count when they come, so those of requests that were cut short do too."""

    num_requests: int = 0  # generations that were not refused
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float = 0.0

    def began(self, num_prompt_tokens: int) -> None:
        """A request is in the queue, with so many tokens in the prompts of all its answers."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def waited(self, record: RequestRecord | None, seconds: float) -> None:
        """An answer is over, after so many seconds. It was in the queue until it was admitted, or to its end."""
        if record is None:
            self.queue_seconds += seconds
        elif (left := record.finished_at if record.admitted_at is None else record.admitted_at) is not None:
            self.queue_seconds += left - record.arrived_at


@dataclass(eq=False)
class Caller:
    """One key's owner: limits, and what counts against them."""

    name: str = ""  # "" where no key is asked for, or keys have no names
    weight: float = 1.0
    requests_per_minute: float | None = None
    max_concurrent: int | None = None
    own_cache: bool = False  # its prefixes are its own: no one can tell by timing what it sent
    clock: Callable[[], float] = time.monotonic
    num_running: int = 0
    usage: KeyUsage = field(default_factory=KeyUsage)
    _allowance: float = field(default=0.0, init=False)
    _counted_at: float = field(default=-math.inf, init=False)

    def tenant(self, user: str | None) -> str:
        """Whom fair scheduling counts a request against."""
        return self.name or user or ""

    def salt(self, salt: str) -> str:
        """What separates this caller's prefixes from others'. Never as a client wrote it: one who shares could write
        what another's becomes."""
        owner = self.name if self.own_cache else ""
        if not owner and not salt:
            return ""
        return hashlib.sha256(f"{owner}\0{salt}".encode()).hexdigest()

    def enter(self) -> None:
        """Count one more request. Raises ApiError when that is one too many."""
        if self.max_concurrent is not None and self.num_running >= self.max_concurrent:
            raise ApiError(
                429,
                f"this key has {self.num_running} requests running: at most {self.max_concurrent} are allowed at once",
                code="concurrency_limit_exceeded",
                retry_after=1,
            )
        if self.requests_per_minute is not None:
            self._take_from_allowance(self.requests_per_minute)
        self.num_running += 1

    def leave(self) -> None:
        self.num_running -= 1

    def _take_from_allowance(self, per_minute: float) -> None:
        """A bucket that holds a minute's requests and fills evenly."""
        now = self.clock()
        full = max(per_minute, 1.0)
        self._allowance = min(full, self._allowance + (now - self._counted_at) * per_minute / 60)
        self._counted_at = now
        if self._allowance < 1:
            wait = math.ceil((1 - self._allowance) * 60 / per_minute)
            raise ApiError(
                429,
                f"this key may send {per_minute:g} requests a minute: the next one is allowed in {wait} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        self._allowance -= 1


@dataclass(frozen=True, slots=True)
class ToldKeys:
    """Keys as another process gets them, which learns none of them by that."""

    secret: bytes
    callers: Sequence[tuple[bytes, str, bool]]  # digest, name, own_cache


class Keys:
    """Finds the caller of a key. Without keys everyone is the same caller."""

    def __init__(self, callers: Iterable[tuple[str, Caller]] = ()) -> None:
        # Keys are found by a digest that is different in every process: the time a look-up takes tells nothing.
        self._secret = secrets.token_bytes(32)
        self._callers = {self._digest(key): caller for key, caller in callers}
        self._everyone = Caller()

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")

    def has(self, key: str) -> bool:
        return self._digest(key) in self._callers

    @property
    def required(self) -> bool:
        return bool(self._callers)

    @property
    def callers(self) -> list[Caller]:
        return list(self._callers.values()) or [self._everyone]

    def named(self, name: str) -> Caller:
        """The caller of that name; keys without a name are all one caller's."""
        return next(caller for caller in self.callers if caller.name == name)

    def told(self) -> ToldKeys:
        """What another process must know to find callers by their keys."""
        callers = [(digest, caller.name, caller.own_cache) for digest, caller in self._callers.items()]
        return ToldKeys(self._secret, callers)

    @classmethod
    def of_told(cls, told: ToldKeys) -> Keys:
        """The same callers, without their limits and what counts against them."""
        keys = cls()
        keys._secret = told.secret
        by_name = {name: Caller(name, own_cache=own_cache) for _, name, own_cache in told.callers}
        keys._callers = {digest: by_name[name] for digest, name, _ in told.callers}
        return keys

    def weights(self) -> dict[str, float]:
        """The shares of named callers, for fair scheduling."""
        return {caller.name: caller.weight for caller in self._callers.values() if caller.name}

    def find(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """The caller of an `Authorization` header or, without one, of `x-api-key`, as clients of Anthropic's API have
        it. Raises ApiError where there is none."""
        if not self._callers:
            return self._everyone
        given = f"Bearer {api_key or ''}" if authorization is None else authorization
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _denied(
                "an API key is needed: send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'",
                "missing_api_key",
            )
        wanted = self._digest(key.strip())
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, wanted):
                found = caller  # and go on: all keys take the same time
        if found is None:
            raise _denied("the API key is not known here", "invalid_api_key")
        return found


class AdminKey:
    """Who may change what the server is made of."""

    def __init__(self, key: str | None, keys: Keys | None = None) -> None:
        """`keys` are the clients', from flags and from the file."""
        if key is not None and not _can_be_sent(key):
            raise ConfigError(
                "admin_key is empty, has spaces around it, or characters that are not printable ASCII"
            )
        if key is not None and keys is not None and keys.has(key):
            raise ConfigError("admin_key is an API key too: it must be another one")
        self._key = None if key is None else key.encode()

    def matches(self, authorization: str | None) -> bool:
        scheme, _, given = (authorization or "").partition(" ")
        if self._key is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), self._key)

    def check(self, authorization: str | None) -> None:
        """Raises ApiError for everyone else."""
        if self._key is None:
            message = "nothing can be changed here: the server was started without --admin-key"
            raise ApiError(403, message, code="admin_disabled")
        if not self.matches(authorization):
            raise _denied(
                "this needs the admin key: send it as 'Authorization: Bearer KEY'", "invalid_admin_key"
            )


def _denied(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def load_keys(api_keys: Iterable[str], file: str | None) -> Keys:
    """Keys from flags, which are all one caller, and from a file, where each has a name."""
    shared = Caller()
    found = [(key, shared) for key in api_keys]
    if file is not None:
        found += _read_file(Path(file))
        names = [caller.name for _, caller in found if caller.name]
        if len(set(names)) < len(names):
            raise ConfigError(f"{file} has the name {_twice(names)!r} twice")
    keys = [key for key, _ in found]
    for number, (key, caller) in enumerate(found, 1):
        if not _can_be_sent(key):
            which = f"the key of {caller.name!r}" if caller.name else f"API key {number}"
            raise ConfigError(
                f"{which} has spaces around it, or characters that are not printable ASCII: no client could send it"
            )
    if len(set(keys)) < len(keys):
        raise ConfigError("an API key is given twice")
    return Keys(found)


def _can_be_sent(key: str) -> bool:
    """Whether a header carries a key as it is: spaces around it are lost, and other letters have no one spelling."""
    return key.isascii() and key.isprintable() and key == key.strip() != ""


def _twice(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _read_file(path: Path) -> list[tuple[str, Caller]]:
    content = read_yaml(path, "the keys file")
    entries = content.get("keys") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"the keys file {str(path)!r} must hold 'keys', a list with at least one key")
    return [_read_entry(f"key {number} of {path}", entry) for number, entry in enumerate(entries, 1)]


def _read_entry(where: str, entry: Any) -> tuple[str, Caller]:
    if not isinstance(entry, dict) or set(entry) - _FIELDS:
        raise ConfigError(f"{where} must be a mapping of {', '.join(sorted(_FIELDS))}, and nothing else")
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
        raise ConfigError(f"{where} must have either 'key' or 'key_env', the variable that holds it")
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
        raise ConfigError(f"{where}: cache is {value!r}: allowed are own and shared")
    return bool(value == "own")
