"""What the reader of a routed request reads: one stream, whatever number of engines it comes from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from inflight.errors import EngineDeadError
from inflight.events import Delta
from inflight.router.routed import RoutedRequest


class StreamOwner(Protocol):
    """The router."""

    async def go_on(self, routed: RoutedRequest, error: EngineDeadError) -> Delta | None:
        """None once another engine has the request; else its last delta."""

    def took(self, routed: RoutedRequest, delta: Delta) -> None: ...

    def forget(self, routed: RoutedRequest) -> None: ...


class RoutedStream(AsyncGenerator[Delta]):
    """A class, since a generator that was never begun does not notice its end."""

    def __init__(self, routed: RoutedRequest, owner: StreamOwner) -> None:
        self._routed = routed
        self._owner = owner
        self._open = True

    async def asend(self, value: None) -> Delta:  # noqa: ARG002
        if not self._open:
            raise StopAsyncIteration
        try:
            delta = await self._next()
        except BaseException:
            self._end()
            raise
        self._owner.took(self._routed, delta)
        if delta.finish_reason is not None:
            self._end()
        return delta

    async def _next(self) -> Delta:
        while True:
            stream = self._routed.stream
            assert stream is not None
            try:
                return await stream.asend(None)
            except EngineDeadError as error:
                last = await self._owner.go_on(self._routed, error)
                if last is not None:
                    return last

    async def athrow(self, *error: Any) -> Delta:
        self._end()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        stream = self._routed.stream
        self._end()
        if stream is not None:
            await stream.aclose()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._owner.forget(self._routed)
