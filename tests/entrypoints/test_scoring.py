"""Many texts of one call through one engine, beside others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from inflight import AsyncEngine
from inflight.errors import EngineError, ParameterError, PromptError, QueueFullError, RequestError
from inflight.events import RequestRecord
from inflight.frontend.scoring import cosines
from inflight.scheduling.batch import Batch, Sampled
from tests.frontend.scoring_engine import CROSS_ENCODER, EMBEDDER, engine
from tests.frontend.text.samples import tokenizer
from tests.support.fake_runner import FakeRunner, expected_vector
from tests.support.requests import FakeEngine
from tests.support.steps import observe
from tests.support.waiting import until_idle

DOCUMENTS = [f"document {index} has " + "some words " * (index % 7) for index in range(60)]


def expected(text: str, *second: str) -> list[float]:
    tok = tokenizer("wordpiece")
    first, *rest = tok.encode_plain([text, *second])
    return expected_vector(tok.pair_frame.around_pair(first, rest[0])[0] if rest else tok.frame.around(first))


@pytest.fixture
async def served() -> AsyncIterator[tuple[AsyncEngine, FakeEngine]]:
    made, fake = engine(EMBEDDER)
    async with made:
        yield made, fake


async def test_results_come_in_the_order_of_the_texts(served: tuple[AsyncEngine, FakeEngine]) -> None:
    made, _ = served
    records: list[RequestRecord] = []
    found = await made.embed(DOCUMENTS, on_record=records.append, tenant="t")
    assert found.vectors.tolist() == [expected(text) for text in DOCUMENTS]
    assert found.num_prompt_tokens == sum(int(vector[1]) for vector in found.vectors)
    assert len(records) == len(DOCUMENTS)
    assert {record.tenant for record in records} == {"t"}
    assert (await made.embed("hello")).vectors.tolist() == [expected("hello")]
    assert (await made.embed([])).vectors.shape == (0, 2)


async def test_scores_are_cosines_and_ranked(served: tuple[AsyncEngine, FakeEngine]) -> None:
    made, _ = served
    scores = await made.score("why?", DOCUMENTS)
    matrix = np.array([expected(text) for text in ["why?", *DOCUMENTS]], dtype=np.float32)
    assert scores.values.tolist() == cosines(matrix[:1], matrix[1:]).tolist()
    assert scores.scale == "cosine"
    ranking = await made.rerank("why?", DOCUMENTS, 3)
    order = sorted(range(len(DOCUMENTS)), key=lambda index: (-scores.values[index], index))[:3]
    assert [item.index for item in ranking.results] == order
    assert [item.document for item in ranking.results] == [DOCUMENTS[index] for index in order]
    assert ranking.num_prompt_tokens == scores.num_prompt_tokens
    with pytest.raises(RequestError, match="cannot classify"):
        await made.classify("text")


async def test_concurrent_calls_get_their_own_results() -> None:
    made, _ = engine(CROSS_ENCODER)
    async with made:
        calls = [
            made.classify([(f"query {n}", text) for text in DOCUMENTS[:8]], scale="logit") for n in range(5)
        ]
        for number, found in enumerate(await asyncio.gather(*calls)):
            assert found.vectors.tolist() == [expected(f"query {number}", text) for text in DOCUMENTS[:8]]
            assert (found.labels, found.scale) == (("no", "yes"), "logit")


async def test_large_call_does_not_delay_small_ones() -> None:
    made, fake = engine(EMBEDDER, max_num_batched_tokens=32, max_num_seqs=4)
    waiting: list[int] = []
    observe(fake.core, lambda record: waiting.append(record.num_running + record.num_waiting))
    done: list[str] = []

    async def ask(name: str, texts: list[str]) -> None:
        await made.embed(texts, request_id=name)
        done.append(name)

    async with made:
        await asyncio.gather(ask("many", DOCUMENTS), ask("one", ["hello"]))
    assert done == ["one", "many"]
    assert max(waiting) <= 2 * 4 + 1


async def test_cancelled_call_aborts_all_its_texts(served: tuple[AsyncEngine, FakeEngine]) -> None:
    made, fake = served
    begun = asyncio.Event()
    task = asyncio.create_task(made.embed(DOCUMENTS * 20, on_record=lambda _: begun.set(), request_id="x"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(made)
    assert len(fake.records) < 1200
    assert await made.embed("hello", request_id="x") is not None  # the id is free again


async def test_call_can_be_aborted_by_its_id(served: tuple[AsyncEngine, FakeEngine]) -> None:
    made, _ = served
    begun = asyncio.Event()
    task = asyncio.create_task(made.embed(DOCUMENTS * 20, on_record=lambda _: begun.set(), request_id="x"))
    await begun.wait()
    with pytest.raises(RequestError, match="already in use"):
        await made.embed("other", request_id="x")
    await made.abort("x")
    with pytest.raises(EngineError, match="abort"):
        await task


@pytest.mark.parametrize("texts", [["fine", "too long " * 100], [*DOCUMENTS * 9, "too long " * 100]])
async def test_rejected_text_fails_only_its_call(
    served: tuple[AsyncEngine, FakeEngine], texts: list[str]
) -> None:
    made, _ = served
    with pytest.raises(PromptError, match=f"text {len(texts) - 1} has 200 tokens"):
        await made.embed(texts)
    assert (await made.embed("hello")).vectors.tolist() == [expected("hello")]


async def test_full_queue_rejects_new_calls_and_delays_started_ones() -> None:
    made, fake = engine(EMBEDDER, max_num_seqs=2)
    fake.core.max_queue = 3
    async with made:
        assert (await made.embed(DOCUMENTS)).vectors.tolist() == [expected(text) for text in DOCUMENTS]
        fake.core.max_queue = -10
        with pytest.raises(QueueFullError):
            await made.embed(DOCUMENTS)


async def test_non_finite_vector_fails_the_call() -> None:
    class Broken(FakeRunner):
        def launch(self, batch: Batch) -> Sampled:
            found = super().launch(batch)
            nan = np.full(2, np.nan, dtype=np.float32).tobytes()
            found.vectors.update(dict.fromkeys(found.vectors, nan))
            return found

    made, _ = engine(EMBEDDER, make_runner=Broken)
    async with made:
        with pytest.raises(EngineError, match="text 0 has results that are not finite"):
            await made.embed(DOCUMENTS)


async def test_unknown_options_are_rejected(served: tuple[AsyncEngine, FakeEngine]) -> None:
    options: dict[str, Any] = {"nosuch": 1}
    with pytest.raises(ParameterError, match="unknown argument nosuch"):
        await served[0].embed("text", **options)
