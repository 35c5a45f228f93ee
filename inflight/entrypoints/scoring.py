"""The scoring calls of `LLM` and `AsyncEngine`: embed, classify, score and rerank.

Their parameters are declared in `inflight/scoring.py`, and `frontend/scoring.py` turns a call into a `ScoringJob`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import count
from typing import Unpack

from inflight.engine.client import EngineClient
from inflight.entrypoints.offline import OfflineRun
from inflight.errors import EngineError, QueueFullError
from inflight.events import Delta
from inflight.frontend.frontend import Frontend
from inflight.frontend.input_processor import Prompt
from inflight.frontend.scoring import CallOptions, PooledVectors, ScoringCall, ScoringJob, check_top_n, ranked
from inflight.frontend.scoring_inputs import EncodedText, Pair
from inflight.outputs import (
    ClassificationOutput,
    Classifications,
    EmbeddingOutput,
    Embeddings,
    PooledT,
    PoolingRequestOutput,
    Ranking,
    RerankResult,
    ScoreOutput,
    Scores,
)
from inflight.request import Request
from inflight.scoring import ClassifyParams, EmbedParams, ScoreParams

STEPS_IN_WINDOW = 2  # the step being computed, and the next one
LONG_TEXT = 2000  # characters from which tokenizing is worth a thread
RETRY_SECONDS = 0.02  # between attempts to add to a full queue


class ScoringMethods(ABC):
    """The scoring methods of `LLM`.

    If one text is rejected, none is computed. Arguments of vLLM that would change nothing are accepted
    (`vllm_compat/`).
    """

    _frontend: Frontend
    _numbers: count[int]

    @abstractmethod
    def _compute(self, run: OfflineRun, show: bool) -> None:
        """Run all requests to their end."""

    def embed(
        self, texts: Prompt | Sequence[Prompt], use_tqdm: bool = True, **params: Unpack[EmbedParams]
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embeddings of texts, or of lists of token ids, which are used unchanged."""
        job = self._frontend.scoring_processor("embed").embed(texts, params)
        requests, pooled = self._pool(job, "embedding", use_tqdm)
        return _outputs(requests, [EmbeddingOutput(vector) for vector in job.finish(pooled.matrix)])

    def classify(
        self,
        texts: Prompt | Pair | Sequence[Prompt | Pair],
        use_tqdm: bool = True,
        **params: Unpack[ClassifyParams],
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return one number for each of the model's labels. A tuple of two texts is classified as a pair."""
        job = self._frontend.scoring_processor("classify").classify(texts, params)
        requests, pooled = self._pool(job, "classifying", use_tqdm)
        labels, rows = job.processor.facts.labels, job.finish(pooled.matrix)
        return _outputs(requests, [ClassificationOutput(vector, labels, job.scale) for vector in rows])

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        **params: Unpack[ScoreParams],
    ) -> list[PoolingRequestOutput[ScoreOutput]]:
        """Return how well each document answers the query: one query for all documents, or one for each."""
        job = self._frontend.scoring_processor("score").score(query, documents, params)
        requests, pooled = self._pool(job, "scoring", use_tqdm)
        values = [ScoreOutput(value, job.scale) for value in job.finish(pooled.matrix).tolist()]
        num_queries = len(requests) - len(values)  # an embedder computes queries separately
        outputs = _outputs(requests[num_queries:], values)
        for index, output in enumerate(outputs if num_queries else ()):
            query_ids = requests[index % num_queries].token_ids
            outputs[index] = replace(output, prompt_token_ids=[*query_ids, *output.prompt_token_ids])
        return outputs

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        use_tqdm: bool = True,
        **params: Unpack[ScoreParams],
    ) -> list[RerankResult]:
        """Score all documents and return the best first, at most `top_n` of them."""
        check_top_n(top_n)
        job = self._frontend.scoring_processor("rerank").score(query, documents, params)
        _, pooled = self._pool(job, "scoring", use_tqdm)
        return ranked(job.finish(pooled.matrix), documents, job.scale, top_n)

    def _pool(self, job: ScoringJob, doing: str, show: bool) -> tuple[list[Request], PooledVectors]:
        """Compute the texts of a job; return a request for each, and their vectors."""
        processor, num_texts = job.processor, job.num_texts
        requests: list[Request] = []
        indices: dict[str, int] = {}  # by request id

        def make_requests() -> Iterator[Request]:
            for chunk in job.chunks():
                for text in processor.inputs.encode(*chunk):
                    request = processor.request(str(next(self._numbers)), text)
                    indices[request.request_id] = len(requests)
                    requests.append(request)
                    yield request

        vectors = PooledVectors(num_texts, processor.facts.size)

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None:
                index = indices[delta.request_id]
                vectors.put(index, delta)
                requests[index].record = delta.record or requests[index].record
            return False

        # Splittable texts may share prefixes, so that it is not known beforehand how many fill a step.
        self._compute(
            OfflineRun(make_requests(), num_texts, lambda _: take, doing, not processor.facts.splittable),
            show,
        )
        return requests, vectors


def _outputs(requests: list[Request], results: list[PooledT]) -> list[PoolingRequestOutput[PooledT]]:
    return [
        PoolingRequestOutput(request.request_id, result, request.token_ids, request.record.num_cached_tokens)
        for request, result in zip(requests, results, strict=True)
    ]


class _EmbedOptions(EmbedParams, CallOptions):
    """Keyword arguments of `embed`."""


class _ClassifyOptions(ClassifyParams, CallOptions):
    """Keyword arguments of `classify`."""


class _ScoreOptions(ScoreParams, CallOptions):
    """Keyword arguments of `score` and `rerank`."""


class AsyncScoringMethods(ABC):
    """The scoring methods of `AsyncEngine`.

    Texts of one call are computed a window at a time, so that other calls get their turn. Cancelling the task aborts
    the texts in the engine. Besides the parameters of their task, all calls take `request_id`, `priority`, `tenant` and
    `cache_salt` as `generate` does, and `on_record`, which is called with the RequestRecord of every finished text.
    RequestError names the text that was rejected by its index.
    """

    _frontend: Frontend

    @abstractmethod
    async def _pool(self, job: ScoringJob, call: ScoringCall) -> PooledVectors:
        """Compute the texts of a job with `ScoringRun`."""

    async def embed(self, texts: Prompt | Sequence[Prompt], **options: Unpack[_EmbedOptions]) -> Embeddings:
        """Return the embeddings of texts, or of lists of token ids, which are used unchanged."""
        call, params = ScoringCall.split(options)
        job = self._frontend.scoring_processor("embed").embed(texts, params)
        pooled = await self._pool(job, call)
        return Embeddings(job.finish(pooled.matrix), pooled.num_prompt_tokens, pooled.num_cached_tokens)

    async def classify(
        self, texts: Prompt | Pair | Sequence[Prompt | Pair], **options: Unpack[_ClassifyOptions]
    ) -> Classifications:
        """Return one number for each of the model's labels. A tuple of two texts is classified as a pair."""
        call, params = ScoringCall.split(options)
        job = self._frontend.scoring_processor("classify").classify(texts, params)
        pooled = await self._pool(job, call)
        counts = pooled.num_prompt_tokens, pooled.num_cached_tokens
        return Classifications(job.finish(pooled.matrix), job.processor.facts.labels, job.scale, *counts)

    async def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], **options: Unpack[_ScoreOptions]
    ) -> Scores:
        """Return how well each document answers the query: one query for all documents, or one for each."""
        call, params = ScoringCall.split(options)
        job = self._frontend.scoring_processor("score").score(query, documents, params)
        pooled = await self._pool(job, call)
        counts = pooled.num_prompt_tokens, pooled.num_cached_tokens
        return Scores(job.finish(pooled.matrix), job.scale, *counts)

    async def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Unpack[_ScoreOptions]
    ) -> Ranking:
        """Score all documents and return the best first, at most `top_n` of them."""
        check_top_n(top_n)
        scores = await self.score(query, documents, **options)
        results = ranked(scores.values, documents, scores.scale, top_n)
        return Ranking(results, scores.scale, scores.num_prompt_tokens, scores.num_cached_tokens)


class ScoringRun:
    """One asynchronous scoring call. Cancelling `run` aborts all its texts in the engine.

    If the queue is full, a call with no text in the engine yet is rejected; one that has started waits for room.
    """

    def __init__(
        self, client: EngineClient, job: ScoringJob, call: ScoringCall, request_id: str, threads: Executor
    ) -> None:
        self._client = client
        self._job = job
        self._call = call
        self._request_id = request_id
        self._threads = threads
        facts = client.facts
        self._window = STEPS_IN_WINDOW * facts.max_num_batched_tokens
        # A short text takes a whole slot of a step, so it counts at least as many tokens as an average slot has.
        self._least_cost = max(1, facts.max_num_batched_tokens // facts.max_num_seqs)
        self._num_tokens = 0  # of texts in the engine or about to be added
        self._running: set[str] = set()  # request ids
        self._freed = asyncio.Event()
        self._started = self._aborted = False
        self._turn = asyncio.Lock()
        self.vectors = PooledVectors(job.num_texts, job.processor.facts.size)

    async def run(self) -> PooledVectors:
        """Return the vectors of all texts. The first error aborts the remaining texts."""
        try:
            async with asyncio.TaskGroup() as group, contextlib.aclosing(self._encoded()) as chunks:
                index = 0
                async for texts in chunks:
                    for text in texts:
                        cost = max(len(text.ids), self._least_cost)
                        await self._wait_for_room(cost)
                        group.create_task(self._compute(index, text, cost))
                        index += 1
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return self.vectors

    async def _encoded(self) -> AsyncGenerator[list[EncodedText]]:
        """Yield all texts in order. The next chunk is tokenized while the current one is computed."""
        job, encode = self._job, self._job.processor.inputs.encode
        if job.num_characters < LONG_TEXT:
            for chunk in job.chunks():
                yield encode(*chunk)
            return
        loop = asyncio.get_running_loop()
        ahead: asyncio.Future[list[EncodedText]] | None = None
        try:
            for chunk in job.chunks():
                ready, ahead = ahead, loop.run_in_executor(self._threads, encode, *chunk)
                if ready is not None:
                    yield await ready
            if ahead is not None:
                yield await ahead
        finally:
            if ahead is not None and not ahead.cancel() and not ahead.cancelled():
                ahead.exception()  # retrieved, so that asyncio does not log it

    async def _wait_for_room(self, cost: int) -> None:
        while self._num_tokens and self._num_tokens + cost > self._window:
            self._freed.clear()
            await self._freed.wait()
        if self._aborted:
            raise EngineError("the call was aborted", code="aborted")
        self._num_tokens += cost

    async def _compute(self, index: int, text: EncodedText, cost: int) -> None:
        call = self._call
        request = self._job.processor.request(f"{self._request_id}/{index}", text, call.context, call.origin)
        try:
            await self._add(request)
            self._running.add(request.request_id)
            async with contextlib.aclosing(self._client.stream(request.request_id)) as deltas:
                async for delta in deltas:
                    if delta.record is not None:
                        call.on_record(delta.record)
                    if delta.finish_reason is not None:
                        self.vectors.put(index, delta)
        finally:
            self._running.discard(request.request_id)
            self._num_tokens -= cost
            self._freed.set()

    async def _add(self, request: Request) -> None:
        try:
            await self._client.add(request)
        except QueueFullError:
            if not self._started:
                raise
            async with self._turn:  # only one text retries at a time
                await self._add_when_there_is_room(request)
        self._started = True

    async def _add_when_there_is_room(self, request: Request) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(QueueFullError):
                return await self._client.add(request)

    async def abort(self) -> int:
        """Abort the call, so that `run` raises EngineError. Return the number of KV blocks freed."""
        self._aborted = True
        return sum([await self._client.abort(request_id) for request_id in list(self._running)])
