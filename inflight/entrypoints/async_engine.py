"""What `AsyncEngine` does with models that embed, classify or score."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.engine import EngineClient, EngineStats, Health, InprocClient, ModelFacts, RequestState
from inflight.errors import ConfigError, EngineError, ParameterError, RequestError
from inflight.frontend import (
    ChatRequest,
    Frontend,
    Generation,
    OutputProcessor,
    Pair,
    PooledVectors,
    PoolingJob,
    PoolingProcessor,
    PoolingRun,
    Prompt,
    RequestContext,
    ToolChoice,
    check_arguments,
    check_top_n,
    ranked,
)
from inflight.outputs import Classifications, CompletionOutput, Embeddings, Ranking, RequestOutput, Scores
from inflight.pooling import Scale
from inflight.sampling_params import MAX_N, SamplingParams
from inflight.text import Tokenizer

if TYPE_CHECKING:
    from inflight.loading import LoadedEngine, LoadProgress

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


OutputKind = Literal["cumulative", "delta", "final"]


class AsyncEngine(AsyncPoolingCalls):
    """Text above, an `EngineClient` below.

    >>> engine = await AsyncEngine.start("path/or/hub-id")
    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...     print(output.outputs[0].text)

    Leaving the loop, or cancelling the task, ends the request and frees its blocks.
    """

    @classmethod
    def of(cls, loaded: LoadedEngine) -> AsyncEngine:
        """Over an engine that is in this process."""
        return cls(loaded, InprocClient(loaded.core, loaded.facts))

    @classmethod
    async def start(
        cls,
        model: str | PathLike[str] | None = None,
        *,
        in_process: bool = True,
        process: ProcessConfig | None = None,
        progress: LoadProgress | None = None,
        **options: Any,
    ) -> AsyncEngine:
        """Load a model without blocking the event loop. Options are those of `LLM`.

        With `in_process=False` the engine gets a process of its own, so that nothing done here slows its steps;
        `process` says how it is watched. With `replicas` there are so many of them, and answers outlive one that
        dies; with `ray_address` they are on the machines of a Ray cluster. That needs the packages of
        inflight-llm[server], and of inflight-llm[ray].
        """
        routing = RouterConfig.taken_from(options)
        config = EngineConfig.create(model, **options)
        if in_process and not routing.is_wanted:
            return cls.of(await asyncio.to_thread(_load, config, progress))
        client = await _start_client(config, routing, process, progress)
        try:
            front = await asyncio.to_thread(Frontend.of, config, client.facts, routing.on_this_machine)
            await asyncio.to_thread(front.warm_up)
        except BaseException:
            await client.close()
            raise
        return cls(front, client)

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        **foreign: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs as they grow: all so far ("cumulative"), what is new ("delta"), or once at the end ("final").

        A reader slower than the engine gets several tokens at a time; the engine never waits for it. Arguments of vLLM
        that change nothing are taken (`vllm_compat/python_api.py`).
        """
        check_arguments(foreign)
        prepare = partial(
            self._frontend.prepare, prompt=prompt, priority=priority, tenant=tenant, cache_salt=cache_salt
        )
        outputs = self._outputs(prepare, False, sampling_params, request_id, output_kind)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_choice: ToolChoice | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        max_reasoning_tokens: int | None = None,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """`generate` for a conversation, through the checkpoint's chat template. `message` of an answer has content,
        reasoning and tool calls apart: all so far, whatever the kind of output."""
        chat = ChatRequest.of(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            reasoning_effort=reasoning_effort,
            max_reasoning_tokens=max_reasoning_tokens,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prepare = partial(
            self._frontend.prepare_chat, chat=chat, priority=priority, tenant=tenant, cache_salt=cache_salt
        )
        outputs = self._outputs(prepare, True, sampling_params, request_id, output_kind)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def _outputs(
        self,
        prepare: Callable[..., OutputProcessor],
        is_slow: bool,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind,
    ) -> AsyncGenerator[RequestOutput]:
        """`prepare` gets a name and parameters, in a thread where it is slow."""
        if output_kind not in get_args(OutputKind):
            raise ParameterError(
                f"output_kind is {output_kind!r}: allowed are {', '.join(get_args(OutputKind))}",
                param="output_kind",
            )
        name = self._name(request_id)
        params = self._frontend.default_sampling_params() if sampling_params is None else sampling_params
        prepared = (
            await asyncio.to_thread(prepare, name, params=params) if is_slow else prepare(name, params=params)
        )
        await self._frontend.validate_async(prepared)
        self._check_free(name)  # it may have been taken meanwhile
        generation = self._calls[name] = Generation(self._client, [prepared])
        sent = _Sent()
        try:
            await generation.start()
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for _, delta in deltas:
                    if delta.error is not None:
                        raise EngineError(delta.error, code=delta.error_code)
                    if delta.prompt_logprobs is not None:  # others must not wait for those of a long prompt
                        await asyncio.to_thread(lambda: prepared.prompt_logprobs)
                    finished = prepared.finished
                    if finished or output_kind != "final":
                        output = prepared.output()
                        yield sent.trim(output) if output_kind == "delta" else _snapshot(output)
                    if finished:
                        return
        finally:
            del self._calls[name]
            await generation.close()

    async def abort(self, request_id: str) -> int:
        """End a request; its stream ends with finish reason "abort", and what returns no stream raises EngineError.
        The number of KV blocks freed."""
        call = self._calls.get(request_id)
        return 0 if call is None else await call.abort()

    async def describe(self, request_id: str) -> list[RequestState]:
        """What happened to a request that is there or was until recently: the states of its answers."""
        found = await self._client.describe(request_id)
        if found is not None:
            return [found]
        states = []
        for index in range(MAX_N):
            state = await self._client.describe(f"{request_id}/{index}")
            if state is None:
                break
            states.append(state)
        return states

    # ---- around it ----

    @property
    def frontend(self) -> Frontend:
        """The text side, for those who make requests themselves."""
        return self._frontend

    @property
    def client(self) -> EngineClient:
        """The handle below, for those who read deltas themselves."""
        return self._client

    @property
    def facts(self) -> ModelFacts:
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer:
        if self._frontend.tokenizer is None:
            raise ConfigError("this engine runs without a tokenizer")
        return self._frontend.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._frontend.max_model_len

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def reset_prefix_cache(self) -> None:
        """Forget all prefixes."""
        await self._client.command("reset_prefix_cache")

    async def sleep(self) -> None:
        """Give up the KV memory, and put the weights into host memory. Raises EngineError while there are requests."""
        await self._client.command("sleep")

    async def wake_up(self) -> None:
        await self._client.command("wake_up")

    async def is_sleeping(self) -> bool:
        return (await self._client.stats()).is_sleeping

    async def health(self) -> Health:
        return await self._client.health()

    async def close(self, drain: float = 0.0) -> None:
        """Stop the loop. Requests may take up to `drain` seconds to end; streams open then end with an error."""
        await self._client.close(drain)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._frontend.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _start_client(
    config: EngineConfig, routing: RouterConfig, process: ProcessConfig | None, progress: LoadProgress | None
) -> EngineClient:
    """An engine in a process of its own, or a router over several."""
    try:
        from inflight.engine.remote.process_client import ProcessClient
        from inflight.router import start_router
    except ImportError as error:
        raise ConfigError(
            f"an engine in a process of its own needs {error.name}: install inflight-llm[server]"
        ) from error
    if not routing.is_wanted:
        return await ProcessClient.start(config, process, progress)
    return await start_router(config, routing, process, progress)


def _load(config: EngineConfig, progress: LoadProgress | None) -> LoadedEngine:
    from inflight.loading import load_engine  # torch, which takes long to import too

    loaded = load_engine(config, progress)
    loaded.warm_up()
    return loaded


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    output.outputs = [
        replace(
            answer,
            token_ids=answer.token_ids.copy(),
            logprobs=None if answer.logprobs is None else answer.logprobs.copy(),
        )
        for answer in output.outputs
    ]
    return output


class _Sent:
    """What of each answer has gone out already."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[int, int]] = {}  # answer -> characters, tokens
        self._prompt_logprobs = False

    def trim(self, output: RequestOutput) -> RequestOutput:
        if self._prompt_logprobs:
            output.prompt_logprobs = None
        self._prompt_logprobs |= output.prompt_logprobs is not None
        output.outputs = [self._rest(answer) for answer in output.outputs]
        return output

    def _rest(self, answer: CompletionOutput) -> CompletionOutput:
        characters, tokens = self._done.get(answer.index, (0, 0))
        self._done[answer.index] = len(answer.text), len(answer.token_ids)
        return replace(
            answer,
            text=answer.text[characters:],
            token_ids=answer.token_ids[tokens:],
            logprobs=None if answer.logprobs is None else answer.logprobs[tokens:],
        )
