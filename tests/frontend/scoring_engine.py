"""A fake model with a head, behind a real tokenizer. Its vector for ids is `expected_vector(ids)`: two numbers."""

from __future__ import annotations

from typing import Any

from inflight import AsyncEngine
from inflight.config import EngineConfig
from inflight.engine.inproc import InprocClient
from inflight.frontend.frontend import Frontend
from inflight.frontend.input_processor import InputProcessor
from inflight.frontend.scoring_inputs import ScoringInputs
from inflight.scoring import PairTemplate, PoolingFacts
from tests.frontend.text.samples import END, tokenizer
from tests.support.requests import FakeEngine

EMBEDDER = PoolingFacts("embed", 2, splittable=False, scores="cosine")
CROSS_ENCODER = PoolingFacts(
    "classify", 2, splittable=False, scores="pair", scale="softmax", labels=("no", "yes")
)
TEMPLATE = PairTemplate(
    prefix=f"{END}judge\n",
    instruction="Find what answers.",
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix=f"{END}\n",
)
RERANKER = PoolingFacts(
    "classify",
    2,
    splittable=True,
    scores="template",
    scale="softmax",
    labels=("no", "yes"),
    template=TEMPLATE,
)


def inputs(facts: PoolingFacts, max_model_len: int = 64, name: str = "wordpiece") -> ScoringInputs:
    return ScoringInputs(facts, tokenizer(name), tokenizer(name).vocab_size, max_model_len)


def frontend(
    facts: PoolingFacts | None, max_model_len: int = 64, name: str = "wordpiece", **more: Any
) -> Frontend:
    tok = tokenizer(name)
    processor = InputProcessor.create(tok, tok.vocab_size, max_model_len, (), 0)
    return Frontend(EngineConfig(), tok, processor, {}, pooling=facts, **more)


def engine(facts: PoolingFacts, **limits: Any) -> tuple[AsyncEngine, FakeEngine]:
    """An engine that serves it, and what happens below."""
    fake = FakeEngine(**{"num_blocks": 256, **limits})
    return AsyncEngine(frontend(facts), InprocClient(fake.core, fake.facts)), fake
