"""What `AsyncEngine` does with models that embed, classify or score."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inflight.engine import EngineClient
from inflight.errors import RequestError
from inflight.frontend import (
    Frontend,
    Generation,
    Pair,
    PooledVectors,
    PoolingJob,
    PoolingProcessor,
    PoolingRun,
    Prompt,
    RequestContext,
    check_top_n,
    ranked,
)
from inflight.outputs import Classifications, Embeddings, Ranking, Scores
from inflight.pooling import Scale

POOLING_THREADS = 2  # that tokenize for embed, classify and score: no chat waits for them


class AsyncPoolingCalls:
    """Texts of one call are computed a window at a time, so that other calls are served between them; cancelling the
    task aborts those that are in the engine. All take `request_id`, `priority`, `tenant` and `cache_salt` as
    `generate` does, and `on_record`, which is called with the RequestRecord of every text that is done. What is
    refused (RequestError) names the text, by its index.
    """

    def __init__(self, frontend: Frontend, client: EngineClient) -> None:
        self._frontend = frontend
        self._client = client
        self._ids = itertools.count()
        self._calls: dict[str, Generation | PoolingRun] = {}  # by the user's request id
        self._threads = ThreadPoolExecutor(POOLING_THREADS, "inflight-pooling")  # that start when first used

    def _name(self, request_id: str | None) -> str:
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        self._check_free(name)
        return name

    def _check_free(self, name: str) -> None:
        if name in self._calls:
            raise RequestError(
                f"request id {name!r} is already in use", param="request_id", code="request_id_in_use"
            )

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> Embeddings:
        """The embeddings of texts (or token ids, which are taken as they are).

        `prompt_name` is one of the model's own prompts to put before each text, `prompt` another text to put there;
        without either it is the model's default one, if it has one. `dimensions` cuts embeddings of models that were
        trained for it. `normalize` makes their length 1, or not, whatever the checkpoint says. A text that is too long
        is refused, or with `truncate` cut at its end; `truncate_prompt_tokens` cuts each to at most so many tokens,
        beside the special ones around it.
        """
        processor = self._frontend.pooling_processor("embed")
        job = processor.embed(
            texts, prompt_name, prompt, dimensions, normalize, truncate, truncate_prompt_tokens
        )
        found = await self._pool(processor, job, **options)
        return Embeddings(job.finish(found.matrix), found.num_prompt_tokens, found.num_cached_tokens)

    async def classify(
        self,
        texts: Prompt | Pair | Sequence[Prompt | Pair],
        *,
        scale: Scale | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> Classifications:
        """One number for each of the model's labels. A tuple of two texts is classified as a pair. What is too long is
        cut as by `embed`."""
        processor = self._frontend.pooling_processor("classify")
        job = processor.classify(texts, scale, truncate, truncate_prompt_tokens)
        found = await self._pool(processor, job, **options)
        counts = found.num_prompt_tokens, found.num_cached_tokens
        return Classifications(job.finish(found.matrix), processor.facts.labels, job.scale, *counts)

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        scale: Scale | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        max_tokens_per_doc: int | None = None,
        **options: Any,
    ) -> Scores:
        """How well each document answers the query: one query for all, or as many queries as documents.

        `scale` is "logit", "sigmoid", "softmax" or "cosine", as far as the model has it; its own unless given.
        `instruction` is for models whose template has one. A document that is too long is refused, or cut at its end
        with `truncate`; `max_tokens_per_doc` cuts it to at most so many tokens. Queries are never cut.
        """
        processor = self._frontend.pooling_processor("score")
        job = processor.score(query, documents, scale, instruction, truncate, max_tokens_per_doc)
        found = await self._pool(processor, job, **options)
        return Scores(job.finish(found.matrix), job.scale, found.num_prompt_tokens, found.num_cached_tokens)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        scale: Scale | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        max_tokens_per_doc: int | None = None,
        **options: Any,
    ) -> Ranking:
        """`score` for all documents, and the best of them first; the best `top_n` only, if given."""
        check_top_n(top_n)
        scores = await self.score(
            query,
            documents,
            scale=scale,
            instruction=instruction,
            truncate=truncate,
            max_tokens_per_doc=max_tokens_per_doc,
            **options,
        )
        results = ranked(scores.values, documents, scores.scale, top_n)
        return Ranking(results, scores.scale, scores.num_prompt_tokens, scores.num_cached_tokens)

    async def _pool(self, processor: PoolingProcessor, job: PoolingJob, **options: Any) -> PooledVectors:
        context = RequestContext(**options)
        name = self._name(context.request_id)
        run = PoolingRun(self._client, processor, job, context, name, self._threads)
        self._calls[name] = run
        try:
            return await run.run()
        finally:
            del self._calls[name]
