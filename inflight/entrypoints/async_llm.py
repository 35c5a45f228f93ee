"""`AsyncLLM`: an `AsyncEngine` with the interface of vLLM's class of that name."""

from __future__ import annotations

import asyncio
from os import PathLike
from typing import Any

from inflight.config import EngineConfig
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.errors import EngineDeadError
from inflight.frontend import ChatTokenizer


class AsyncEngineArgs:
    """The options of an engine (those of `LLM`), for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self.config = EngineConfig.create(model, **options)


class AsyncLLM(AsyncEngine):
    """An engine in a thread of this process. `AsyncEngine.start` can also start it in other processes."""

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **foreign: Any) -> AsyncLLM:  # noqa: ARG003
        """Load a model and wait for it. vLLM's other arguments only affect its logging and are ignored."""
        from inflight.loading import load_engine  # imports torch, which is slow

        loaded = load_engine(engine_args.config)
        loaded.warm_up()
        engine = cls.of(loaded)
        assert isinstance(engine, AsyncLLM)
        return engine

    async def get_tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self._frontend, self.tokenizer)

    async def check_health(self) -> None:
        """Raise EngineDeadError unless the engine is healthy."""
        health = await self._client.health()
        if not health.healthy:
            raise EngineDeadError(health.error or f"the engine is {health.state}")

    def shutdown(self) -> None:
        """Close the engine, in a task if an event loop is running."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.close())
        else:
            self._closing = loop.create_task(self.close())
