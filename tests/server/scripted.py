"""A server whose model says what a test has written: for what clients see of calls and thoughts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from inflight import AsyncEngine
from inflight.config import EngineConfig
from inflight.engine.client import Command, Health, ModelFacts, RequestState
from inflight.engine.stats import EngineStats
from inflight.events import Delta, KVUsage, PositionLogprobs, RequestRecord, TokenLogprob, pack_logprobs
from inflight.frontend.frontend import Frontend
from inflight.request import Request
from tests.frontend.text.templates import QWEN3
from tests.server.live import Backend, Live, live_server
from tests.support.checkpoints import write_tokenizer
from tests.support.no_timeline import NoTimeline

SPECIALS = ["<|im_start|>", "<|im_end|>"]


def write_folder(folder: Path, template: str = QWEN3, specials: tuple[str, ...] = ()) -> Path:
    """A tokenizer with this template."""
    write_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([*SPECIALS, *specials])
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "chat_template": template, "eos_token": "<|im_end|>"})
    )
    return folder


class ScriptedClient(NoTimeline):
    """Implements `EngineClient`: answers with `script`, what `scripts` has for each next request, or what `reply` makes
    of the request."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.script = "Hello."
        self.scripts: list[str] = []
        self.reply: Callable[[Request], str] | None = None
        self.piece = 1  # tokens in a delta
        self.num_allowed: float = math.inf  # tokens of an answer that may come for now
        self.error: tuple[str, str] | None = None  # code and message with which answers end
        self.requests: list[Request] = []  # so far
        self.encode: Callable[[str], list[int]] = lambda _: []
        self._told: dict[str, list[int]] = {}

    async def add(self, request: Request) -> None:
        self.requests.append(request)
        self._told[request.request_id] = [*self.encode(self._text(request)), *self.facts.eos_token_ids]

    def _text(self, request: Request) -> str:
        if self.reply is not None:
            return self.reply(request)
        return self.scripts.pop(0) if self.scripts else self.script

    async def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        request = next(request for request in self.requests if request.request_id == request_id)
        ids = self._told[request_id]
        answer_ids = ids[: request.max_tokens]
        for start, end in pairwise([*range(0, len(answer_ids), self.piece), len(answer_ids)]):
            while start >= self.num_allowed:
                await asyncio.sleep(0.002)
            scored: list[PositionLogprobs] = [
                pack_logprobs([TokenLogprob(i, -0.5, 1)]) for i in answer_ids[start:end]
            ]
            yield Delta(
                request_id,
                answer_ids[start:end],
                logprobs=scored if request.params.logprobs is not None else None,
            )
        reason = "error" if self.error else "stop" if answer_ids == ids else "length"
        record = RequestRecord(request_id, "", 0, request.num_prompt_tokens, finish_reason=reason)
        code, message = self.error or (None, None)
        stop_id = ids[-1] if reason == "stop" else None
        yield Delta(
            request_id,
            [],
            finish_reason=reason,
            stop_token_id=stop_id,
            record=record,
            error=message,
            error_code=code,
        )

    async def abort(self, request_id: str, reason: str = "abort") -> int:  # noqa: ARG002
        return 0

    async def command(self, command: Command) -> None:
        """It has none to give."""

    async def describe(self, request_id: str) -> RequestState | None:  # noqa: ARG002
        return None

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, KVUsage(0, 0, 0, 0, 16, 0))

    async def health(self) -> Health:
        return Health(True, 0.0)

    async def close(self, drain: float = 0.0) -> None:
        """There is nothing to stop."""


class ScriptedBackend(Backend):
    """Over a `ScriptedClient`."""

    max_model_len = 4096

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder = folder
        super().__init__(**options)

    async def _start(self, options: dict[str, Any]) -> AsyncEngine:
        config = EngineConfig.create(self._folder, **options)
        tokenizer = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        facts = ModelFacts(
            "scripted", size, self.max_model_len, (end,), {}, str(self._folder), "none", "none", 64, 16, 8, 64
        )
        self.client = ScriptedClient(facts)
        self.client.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        return AsyncEngine(Frontend.from_config(config, facts), self.client)


@contextmanager
def scripted_server(folder: Path, **options: Any) -> Iterator[tuple[Live, ScriptedClient]]:
    """Options are those of the engine."""
    backend = ScriptedBackend(folder, **options)
    try:
        with live_server(backend) as live:
            yield live, backend.client
    finally:
        backend.close()
