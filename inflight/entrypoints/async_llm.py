"""`AsyncEngine` in the shape of vLLM's `AsyncLLM`, for code that was written for that."""

from __future__ import annotations

import asyncio
from os import PathLike
from typing import Any

from inflight.config import EngineConfig
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.errors import EngineDeadError
from inflight.frontend import ChatTokenizer


class AsyncEngineArgs:
    """The options of an engine, those of `LLM`, to be given to `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self.config = EngineConfig.create(model, **options)


class AsyncLLM(AsyncEngine):
    """The engine runs in a thread of this process; `AsyncEngine.start` can give it one of its own, or several."""

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **foreign: Any) -> AsyncLLM:  # noqa: ARG003
        """Load a model. Blocks until it is there; what vLLM's takes besides says only how it logs."""
        from inflight.loading import load_engine  # torch, which takes long to import

        loaded = load_engine(engine_args.config)
        loaded.warm_up()
        found = cls.of(loaded)
        assert isinstance(found, AsyncLLM)
        return found

    async def get_tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self._frontend, self.tokenizer)

    async def check_health(self) -> None:
        """Raises EngineDeadError unless the engine makes progress."""
        health = await self._client.health()
        if not health.healthy:
            raise EngineDeadError(health.error or f"the engine is {health.state}")

    def shutdown(self) -> None:
        """`close`, as soon as the event loop comes to it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.close())
        else:
            self._closing = loop.create_task(self.close())
