"""Whether a request may begin: the limits of its key, and its id, which no other may have meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

from inflight.server.errors import ApiError
from inflight.server.keys import Caller


class AdmissionControl(Protocol):
    """`request_id` is None for what is over at once and so cannot be asked for."""

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        """Count one more request. Raises ApiError when that is one too many, or another has its id."""

    def leave(self, caller: Caller, request_id: str | None) -> None:
        """One that had entered has ended."""


class LocalAdmission:
    """Of a server that is one process, or of the process that counts for several."""

    def __init__(self) -> None:
        self._running: set[tuple[str, str]] = set()

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        caller.enter()
        if request_id is None:
            return
        if (caller.name, request_id) in self._running:
            caller.leave()
            message = f"request_id is {request_id!r}: a request of that id is running"
            raise ApiError(400, message, code="request_id_in_use", param="request_id")
        self._running.add((caller.name, request_id))

    def leave(self, caller: Caller, request_id: str | None) -> None:
        caller.leave()
        if request_id is not None:
            self._running.discard((caller.name, request_id))


@asynccontextmanager
async def counted(admission: AdmissionControl, caller: Caller) -> AsyncGenerator[None]:
    """For the time of one request. Raises ApiError when that is one too many."""
    await admission.enter(caller, None)
    try:
        yield
    finally:
        admission.leave(caller, None)
