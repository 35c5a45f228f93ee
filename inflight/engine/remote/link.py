"""The seam between a client and an engine in another process: what is sent, what comes back, how it does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from inflight.engine.client import Health
from inflight.engine.remote.supervisor import EngineEnded, EngineStalled
from inflight.engine.remote.wire import Codec, Message, Ready, StepOutputs


class EngineLink(Protocol):
    """The way to an engine in another process. `Supervisor` is one that starts it, too."""

    closing: bool
    working: bool

    @property
    def engine_process(self) -> EngineChannel: ...

    @property
    def state(self) -> str: ...

    @property
    def num_dropped(self) -> int: ...

    def messages(self) -> AsyncGenerator[Ready | StepOutputs | EngineStalled | EngineEnded]: ...

    def trouble(self) -> str | None: ...

    def health(self) -> Health: ...

    async def restart(self) -> None: ...

    def give_up(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class EngineChannel(Protocol):
    """Where messages go."""

    @property
    def codec(self) -> Codec[Any]: ...

    @property
    def process_id(self) -> int | None: ...

    def send(self, message: Message) -> None: ...

    def send_frame(self, frame: bytearray) -> None: ...
