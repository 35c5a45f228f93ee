"""Engines without weights that pool: what a head returns for a text is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from inflight import AsyncEngine
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.config import EngineConfig
from inflight.engine.inproc import InprocClient
from inflight.frontend.frontend import Frontend
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.kv.layout import KVLayout
from inflight.scheduling.batch import Batch, Sampled
from inflight.scoring import PairTemplate, PoolingFacts
from tests.server.live import Backend
from tests.support.fake_runner import FakeRunner
from tests.support.requests import FakeEngine

EMBEDDER = PoolingFacts(
    "embed",
    size=16,
    splittable=True,
    normalize=True,
    dimensions=(4, 8),
    prompts={"query": "query: ", "document": "passage: "},
    scores="cosine",
)
CLASSIFIER = PoolingFacts(
    "classify", size=3, splittable=True, labels=("bad", "fair", "good"), scale="softmax"
)
RERANKER = PoolingFacts(
    "classify",
    size=2,
    splittable=True,
    labels=("no", "yes"),
    scale="softmax",
    scores="template",
    template=PairTemplate(
        "", "find it", "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}", ""
    ),
)
TOKENIZER = Tokenizer.load(Path(checkpoint_folder()))
MAX_LEN = 512


def vector_of(ids: Sequence[int], size: int) -> NDArray[np.float32]:
    """What the head returns for a text."""
    seed = crc32(np.asarray(ids, dtype="<i8").tobytes())
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


class PoolingRunner(FakeRunner):
    """Counts its steps."""

    def __init__(self, num_blocks: int, layout: KVLayout, size: int) -> None:
        super().__init__(num_blocks, layout, vocab_size=2048)
        self._size = size
        self.num_steps = 0

    def launch(self, batch: Batch) -> Sampled:
        self.num_steps += 1
        found = super().launch(batch)
        for entry in found.vectors:
            row = self.rows[batch.rows[entry]]
            ids = row.request.token_ids[: row.request.num_prompt_tokens]
            found.vectors[entry] = vector_of(ids, self._size).tobytes()
        return found


class PooledBackend(Backend):
    """An engine with such a head, in a thread."""

    def __init__(
        self, facts: PoolingFacts, generates: bool = False, max_queue: int = 1024, **options: Any
    ) -> None:
        self._facts = facts
        self._generates = generates
        self._max_queue = max_queue
        super().__init__(**options)

    async def _start(self, options: dict[str, Any]) -> AsyncEngine:
        size = self._facts.size
        fake = FakeEngine(
            make_runner=lambda num_blocks, layout: PoolingRunner(num_blocks, layout, size),
            **{"num_blocks": 256, "block_size": 16, "max_num_batched_tokens": 256, **options},
        )
        fake.core.max_queue = self._max_queue
        facts = replace(
            fake.facts,
            vocab_size=TOKENIZER.vocab_size,
            max_model_len=MAX_LEN,
            tokenizer_folder=str(checkpoint_folder()),
            generates=self._generates,
            pooling=self._facts,
        )
        client = InprocClient(fake.core, facts)
        return AsyncEngine(Frontend.from_config(EngineConfig.create(), facts), client)

    @property
    def runner(self) -> PoolingRunner:
        runner: Any = self.core.runner
        assert isinstance(runner, PoolingRunner)
        return runner
