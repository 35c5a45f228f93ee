"""The synchronous engine: prompts in, outputs back, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar

from rich.console import Console

from inflight.config import EngineConfig, RouterConfig
from inflight.engine import EngineStats, RequestFeed, StepObserver
from inflight.errors import ConfigError, EngineError, ParameterError, RequestError
from inflight.events import Delta
from inflight.frontend import (
    ChatRequest,
    Frontend,
    OutputProcessor,
    Pair,
    PooledVectors,
    PoolingJob,
    PoolingProcessor,
    Prompt,
    RequestContext,
    ToolChoice,
    check_top_n,
    checked_tools,
    ranked,
    split_prompts,
    tool_choice_of,
)
from inflight.garbage import paused_collection
from inflight.interrupts import held_interrupts
from inflight.loading import LoadedEngine, load_engine
from inflight.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledT,
    PoolingRequestOutput,
    RequestOutput,
    RerankResult,
    ScoreOutput,
)
from inflight.pooling import Scale
from inflight.progress_bars import loading_bar, request_bar
from inflight.replicated import ReplicatedEngine
from inflight.request import Request, SamplingParams
from inflight.text import Tokenizer

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class LLM:
    """A model, ready to generate.

    >>> llm = LLM(model="path/or/hub-id", max_num_batched_tokens=1024)
    >>> outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))
    >>> outputs[0].outputs[0].text

    Without a model it is the built-in one. Options are those of `ModelConfig`, `CacheConfig` and
    `SchedulerConfig`, by name. With `replicas` there are so many engines, each in a process of its own, and the options
    of `RouterConfig`, `ray_address` among them; that needs the packages of inflight-llm[server].
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, show_progress: bool = True, **options: Any
    ) -> None:
        routing = RouterConfig.taken_from(options)
        config = EngineConfig.create(model, **options)
        self._engine: LoadedEngine  # where it is in this process
        self._replicas: ReplicatedEngine | None = None  # where there are several
        with loading_bar(config.model.model or "the built-in model", show_progress) as progress:
            if not routing.is_wanted:
                self._engine = load_engine(config, progress)
                self._frontend: Frontend = self._engine
                description = self._engine.platform.describe()
            else:
                self._replicas = ReplicatedEngine(config, routing, progress)
                self._frontend = self._replicas.frontend
                description = self._replicas.description
        if progress is not None:
            Console(stderr=True).print(description, style="dim", highlight=False)
        self._num_requests = 0
        self._closed = False

    # ---- generating ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer every prompt: text, a list of token ids, or {"prompt_token_ids": [...]}.

        Parameters, priority (smaller first) and tenant are one for all prompts, or a list with one for each.
        Outputs come in the order of the prompts. If one prompt is refused, none is run. A request that fails
        while it runs fails alone, with finish reason "error"; only if all fail is EngineError raised.
        """
        items = split_prompts(prompts)
        priorities = _for_each(items, priority, int, "priorities", "priority")
        tenants = _for_each(items, tenant, str, "tenants", "tenant")
        places = [*zip(items, priorities, tenants, strict=True)]

        def prepare(index: int, request_id: str, params: SamplingParams) -> OutputProcessor:
            prompt, priority, tenant = places[index]
            return self._frontend.prepare(request_id, prompt, params, priority, tenant)

        return self._run(self._prepare(items, sampling_params, prepare), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        tool_choice: ToolChoice | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        max_reasoning_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the checkpoint's chat template.

        Of each answer, `message` has content, reasoning and tool calls apart; `message.as_dict()` is what to append to
        the conversation. Tools and the choice among them are as in OpenAI's API.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else list(messages)
        chats = [
            ChatRequest(
                conversation,
                checked_tools(tools),
                tool_choice_of(tool_choice),
                parallel_tool_calls,
                reasoning_effort,
                max_reasoning_tokens,
                chat_template_kwargs or {},
                add_generation_prompt,
                continue_final_message,
            )
            for conversation in conversations
        ]

        def prepare(index: int, request_id: str, params: SamplingParams) -> OutputProcessor:
            return self._frontend.prepare_chat(request_id, chats[index], params)

        return self._run(self._prepare(chats, sampling_params, prepare), use_tqdm)

    def _prepare(
        self,
        items: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Callable[[int, str, SamplingParams], OutputProcessor],
    ) -> list[OutputProcessor]:
        """All of them, or none."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        found = []
        params = _for_each(items, sampling_params, SamplingParams, "sampling params", "sampling_params")
        for index, each in enumerate(params):
            request_id = str(self._num_requests)
            self._num_requests += 1
            try:
                found.append(prepare(index, request_id, each))
            except RequestError as error:
                if len(items) > 1:
                    error.add_note(f"in prompt {index} of {len(items)}")
                raise
        return found

    def _run(self, prompts: list[OutputProcessor], show: bool) -> list[RequestOutput]:
        by_id = {answer.request.request_id: prompt for prompt in prompts for answer in prompt.answers}
        requests = [answer.request for prompt in prompts for answer in prompt.answers]
        self._compute(
            requests, len(requests), lambda delta: by_id[delta.request_id].push(delta), "generating", show
        )
        outputs = [prompt.output() for prompt in prompts]
        failed = [answer.error for output in outputs for answer in output.outputs if answer.error]
        if failed and len(failed) == len(by_id):
            raise EngineError(f"all {len(failed)} requests failed; the first with: {failed[0]}")
        if failed:
            logger.warning("%d of %d requests failed", len(failed), len(by_id))
        return outputs

    def _compute(
        self,
        requests: Iterable[Request],
        num_requests: int,
        take: Callable[[Delta], bool],
        doing: str,
        show: bool,
        lazily: bool = False,
    ) -> None:
        """Step until all requests have ended. `take` gets every delta, and says whether its request is to end now.
        Lazily, requests are made as steps need them."""
        if self._closed:
            raise EngineError("this LLM was closed")
        if self._replicas is not None:
            with request_bar(doing, num_requests, show) as advance:
                return self._replicas.compute(list(requests), take, advance)
        core = self._engine.core
        feed = RequestFeed(core, requests, lazily)
        with paused_collection(), held_interrupts() as let_go:
            try:
                feed.fill()
                with request_bar(doing, num_requests, show) as advance:
                    while core.has_work or not feed.is_empty:
                        let_go()  # between two steps, where all books are in order
                        feed.fill()
                        deltas = core.step()
                        for delta in deltas:
                            if take(delta):
                                deltas += core.abort(delta.request_id, "stop")[1]
                        advance(deltas)
            except BaseException:  # Ctrl-C above all
                self._clear(feed.added)
                raise

    def _clear(self, request_ids: Iterable[str]) -> None:
        """Empty the engine after a run that broke off, so that it can go on."""
        core = self._engine.core
        for request_id in request_ids:
            core.abort(request_id)
        while core.has_work:  # what is still in flight
            core.step()
        # A step that was cut short has not filled the blocks that it promised to the prefix cache.
        core.scheduler.blocks.drop_cache()

    # ---- embedding, classifying, scoring ----

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
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The embeddings of texts, or of lists of token ids, which are taken as they are.

        `prompt_name` is one of the model's own prompts to put before each text, `prompt` another text to put there;
        without either it is the model's default one, if it has one. `dimensions` cuts embeddings of models that were
        trained for it. `normalize` makes their length 1, or not, whatever the checkpoint says. A text that is too long
        is refused, and all others with it, or with `truncate` cut at its end; `truncate_prompt_tokens` cuts each to at
        most so many tokens, beside the special ones around it.
        """
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
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """One number for each of the model's labels. A tuple of two texts is classified as a pair. What is too long is
        refused, or cut as by `embed`."""
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
    ) -> list[PoolingRequestOutput[ScoreOutput]]:
        """How well each document answers the query: one query for all, or as many queries as documents.

        `scale` is "logit", "sigmoid", "softmax" or "cosine", as far as the model has it; its own unless given.
        `instruction` is for models whose template has one. A document that is too long is refused, or cut at its end
        with `truncate`; `max_tokens_per_doc` cuts it to at most so many tokens. Queries are never cut.
        """
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
        self._compute(made(), num_texts, take, doing, show, lazily=not processor.facts.splittable)
        return requests, vectors

    # ---- around it ----

    def get_tokenizer(self) -> Tokenizer:
        if self._frontend.tokenizer is None:
            raise ConfigError("this engine runs without a tokenizer")
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return self._frontend.default_sampling_params()

    def get_default_sampling_fields(self) -> dict[str, Any]:
        """The same as fields, only those that it names: for callers who override some."""
        return dict(self._frontend.default_params)

    @property
    def max_model_len(self) -> int:
        return self._frontend.max_model_len

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self._frontend.input_processor.vocab_size

    def stats(self) -> EngineStats:
        return self._engine.core.stats() if self._replicas is None else self._replicas.stats()

    def observe(self, observer: StepObserver) -> None:
        """Call `observer` with the record of every step; with replicas, in a thread of theirs."""
        if self._replicas is not None:
            return self._replicas.observe(observer)
        self._engine.core.observers.append(observer)
        return None

    def unobserve(self, observer: StepObserver) -> None:
        if self._replicas is not None:
            return self._replicas.unobserve(observer)
        self._engine.core.observers.remove(observer)
        return None

    def close(self) -> None:
        """Give back the memory. The engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            (self._replicas or self._engine).close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _outputs(requests: list[Request], found: list[PooledT]) -> list[PoolingRequestOutput[PooledT]]:
    return [
        PoolingRequestOutput(request.request_id, pooled, request.token_ids, request.record.num_cached_tokens)
        for request, pooled in zip(requests, found, strict=True)
    ]


def _for_each(
    prompts: Sequence[Any], given: T | Sequence[T], kind: type[T], name: str, param: str
) -> list[T]:
    """One for each prompt, from one for all or from a list."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    if not isinstance(given, Sequence):
        raise ParameterError(
            f"{name} are of type {type(given).__name__}: give a {kind.__name__}, or a list of them",
            param=param,
        )
    if len(given) != len(prompts):
        raise ParameterError(
            f"there are {len(given)} {name} for {len(prompts)} prompts: give one, or a list of as many",
            param=param,
        )
    return list(given)
