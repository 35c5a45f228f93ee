"""What `LLM` does with models that embed, classify or score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from inflight.events import Delta
from inflight.frontend import (
    Frontend,
    Pair,
    PooledVectors,
    PoolingJob,
    PoolingProcessor,
    Prompt,
    RequestContext,
    check_arguments,
    check_top_n,
    ranked,
)
from inflight.offline import OfflineRun
from inflight.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledT,
    PoolingRequestOutput,
    RerankResult,
    ScoreOutput,
)
from inflight.pooling import Scale
from inflight.request import Request


class PoolingCalls(ABC):
    """Needs an engine to run requests on. Arguments of vLLM that change nothing are taken (`vllm_compat/`)."""

    _frontend: Frontend
    _num_requests: int

    @abstractmethod
    def _compute(self, run: OfflineRun, show: bool) -> None:
        """To its end."""

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        **foreign: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The embeddings of texts, or of lists of token ids, which are taken as they are.

        `prompt_name` is one of the model's own prompts to put before each text, `prompt` another text to put there;
        without either it is the model's default one, if it has one. `dimensions` cuts embeddings of models that were
        trained for it. `normalize` makes their length 1, or not, whatever the checkpoint says. A text that is too long
        is refused, and all others with it, or with `truncate` cut at its end; `truncate_prompt_tokens` cuts each to at
        most so many tokens, beside the special ones around it.
        """
        check_arguments(foreign)
        processor = self._frontend.pooling_processor("embed")
        job = processor.embed(
            texts, prompt_name, prompt, dimensions, normalize, truncate, truncate_prompt_tokens
        )
        requests, found = self._pool(processor, job, "embedding", use_tqdm)
        return _outputs(requests, [EmbeddingOutput(vector) for vector in job.finish(found.matrix)])

    def classify(
        self,
        texts: Prompt | Pair | Sequence[Prompt | Pair],
        use_tqdm: bool = True,
        *,
        scale: Scale | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        **foreign: Any,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """One number for each of the model's labels. A tuple of two texts is classified as a pair. What is too long is
        refused, or cut as by `embed`."""
        check_arguments(foreign)
        processor = self._frontend.pooling_processor("classify")
        job = processor.classify(texts, scale, truncate, truncate_prompt_tokens)
        requests, found = self._pool(processor, job, "classifying", use_tqdm)
        labels = processor.facts.labels
        rows = job.finish(found.matrix)
        return _outputs(requests, [ClassificationOutput(vector, labels, job.scale) for vector in rows])

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        scale: Scale | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        max_tokens_per_doc: int | None = None,
        **foreign: Any,
    ) -> list[PoolingRequestOutput[ScoreOutput]]:
        """How well each document answers the query: one query for all, or as many queries as documents.

        `scale` is "logit", "sigmoid", "softmax" or "cosine", as far as the model has it; its own unless given.
        `instruction` is for models whose template has one. A document that is too long is refused, or cut at its end
        with `truncate`; `max_tokens_per_doc` cuts it to at most so many tokens. Queries are never cut.
        """
        check_arguments(foreign)
        processor = self._frontend.pooling_processor("score")
        job = processor.score(query, documents, scale, instruction, truncate, max_tokens_per_doc)
        requests, found = self._pool(processor, job, "scoring", use_tqdm)
        values = [ScoreOutput(value, job.scale) for value in job.finish(found.matrix).tolist()]
        num_queries = len(requests) - len(values)  # that were computed apart from the documents
        outputs = _outputs(requests[num_queries:], values)
        for index, output in enumerate(outputs if num_queries else ()):
            before = requests[index % num_queries].token_ids
            outputs[index] = replace(output, prompt_token_ids=[*before, *output.prompt_token_ids])
        return outputs

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        use_tqdm: bool = True,
        *,
        scale: Scale | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        max_tokens_per_doc: int | None = None,
    ) -> list[RerankResult]:
        """`score` for all documents, and the best of them first; the best `top_n` only, if given."""
        check_top_n(top_n)
        processor = self._frontend.pooling_processor("rerank")
        job = processor.score(query, documents, scale, instruction, truncate, max_tokens_per_doc)
        _, found = self._pool(processor, job, "scoring", use_tqdm)
        return ranked(job.finish(found.matrix), documents, job.scale, top_n)

    def _pool(
        self, processor: PoolingProcessor, job: PoolingJob, doing: str, show: bool
    ) -> tuple[list[Request], PooledVectors]:
        """A request for each text of a job, and their vectors."""
        first, num_texts = self._num_requests, job.num_texts
        self._num_requests += num_texts
        requests: list[Request] = []

        def made() -> Iterator[Request]:
            context = RequestContext()
            for chunk in job.chunks():
                for text in processor.inputs.encode(*chunk):
                    requests.append(processor.request(str(first + len(requests)), text, context))
                    yield requests[-1]

        vectors = PooledVectors(num_texts, processor.facts.size)

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None:
                index = int(delta.request_id) - first
                vectors.put(index, delta)
                requests[index].record = delta.record or requests[index].record
            return False

        # Texts that can be split may share what they begin with: how many fill a step is not known then.
        self._compute(OfflineRun(made(), num_texts, take, doing, not processor.facts.splittable), show)
        return requests, vectors


def _outputs(requests: list[Request], found: list[PooledT]) -> list[PoolingRequestOutput[PooledT]]:
    return [
        PoolingRequestOutput(request.request_id, pooled, request.token_ids, request.record.num_cached_tokens)
        for request, pooled in zip(requests, found, strict=True)
    ]
