"""`AsyncEngine`: the asynchronous Python API, over an engine in this process, in its own process, or over replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.engine.client import (
    EngineClient,
    Health,
    ModelFacts,
    RequestState,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from inflight.engine.inproc import InprocClient
from inflight.engine.stats import EngineStats
from inflight.entrypoints.scoring import AsyncScoringMethods, ScoringRun
from inflight.errors import ConfigError, EngineDeadError, EngineError, ParameterError, RequestError
from inflight.frontend.chat import ChatOptions, ChatRequest
from inflight.frontend.chat_tokenizer import ChatTokenizer
from inflight.frontend.frontend import Frontend
from inflight.frontend.generation import Generation
from inflight.frontend.input_processor import Prompt, check_arguments
from inflight.frontend.output_processor import OutputProcessor
from inflight.frontend.scoring import PooledVectors, ScoringCall, ScoringJob
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.outputs import CompletionOutput, RequestOutput
from inflight.request import ContextOptions, RequestContext
from inflight.sampling_params import MAX_N, SamplingParams

if TYPE_CHECKING:
    from inflight.loading.engine import LoadedEngine, LoadProgress

SCORING_THREADS = 2  # tokenize for embed, classify and score, so that chats do not wait for them


OutputKind = Literal["cumulative", "delta", "final"]


class _ChatCallOptions(ChatOptions, ContextOptions):
    """Keyword arguments of `chat`."""


class AsyncEngine(AsyncScoringMethods):
    """Generates text asynchronously, through an `EngineClient`.

    >>> engine = await AsyncEngine.start("path/or/hub-id")
    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...     print(output.outputs[0].text)

    Leaving the loop or cancelling the task aborts the request and frees its blocks. Only one event loop may use an
    engine at a time.
    """

    def __init__(self, frontend: Frontend, client: EngineClient) -> None:
        self._frontend = frontend
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that uses the engine
        self._loop_lock = threading.Lock()
        self._ids = itertools.count()
        self._calls: dict[str, Generation | ScoringRun] = {}  # by the user's request id
        self._threads = ThreadPoolExecutor(SCORING_THREADS, "inflight-scoring")  # started on first use

    @classmethod
    def from_loaded(cls, loaded: LoadedEngine) -> AsyncEngine:
        """Create an AsyncEngine over an engine in this process."""
        return cls(loaded.frontend, InprocClient(loaded.core, loaded.facts))

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
        """Load a model without blocking the event loop. The options are those of `LLM`.

        With `in_process=False` the engine runs in its own process, so that this process cannot slow its steps;
        `process` configures its supervision. `replicas` starts several engines, and requests survive the death of one;
        with `ray_address` they run on the machines of a Ray cluster. Engines in other processes need
        inflight-llm[server], and Ray needs inflight-llm[ray].
        """
        routing = RouterConfig.taken_from(options)
        config = EngineConfig.create(model, **options)
        if in_process and not routing.is_enabled:
            return cls.from_loaded(await asyncio.to_thread(_load, config, progress))
        client = await _start_client(config, routing, process, progress)
        try:
            frontend = await asyncio.to_thread(
                Frontend.from_config, config, client.facts, routing.on_this_machine
            )
            await asyncio.to_thread(frontend.warm_up)
        except BaseException:
            await client.close()
            raise
        engine = cls(frontend, client)
        engine._own_client()  # its connections belong to this loop
        return engine

    # ---- requests ----

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Return outputs as they grow: all so far ("cumulative"), new parts ("delta"), or once at the end ("final").

        A slow reader gets several tokens at a time; the engine never waits for it. The options are `priority`, `tenant`
        and `cache_salt` (`RequestContext`). Arguments of vLLM that would change nothing are accepted
        (`vllm_names.py`).
        """
        context = RequestContext.pop(options)
        check_arguments(options)
        prepare = partial(self._frontend.prepare, prompt=prompt, context=context)
        return self._outputs(prepare, False, sampling_params, request_id, output_kind)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        **options: Unpack[_ChatCallOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Do the same for a conversation, through the checkpoint's chat template.

        An output's `message` has content, reasoning and tool calls so far, whatever the output kind.
        """
        chat_options: dict[str, Any] = dict(options)
        context = RequestContext.pop(chat_options)
        chat = ChatRequest.from_messages(messages, **chat_options)
        prepare = partial(self._frontend.prepare_chat, chat=chat, context=context)
        return self._outputs(prepare, True, sampling_params, request_id, output_kind)

    async def _outputs(
        self,
        prepare: Callable[..., OutputProcessor],
        is_slow: bool,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind,
    ) -> AsyncGenerator[RequestOutput]:
        """Prepare a request (in a thread if that `is_slow`), run it and yield its outputs."""
        if output_kind not in get_args(OutputKind):
            reason = f"allowed are {', '.join(get_args(OutputKind))}"
            raise ParameterError.of_value("output_kind", output_kind, reason)
        name = self._name(request_id)
        params = self._frontend.default_sampling_params() if sampling_params is None else sampling_params
        prepared = (
            await asyncio.to_thread(prepare, name, params=params) if is_slow else prepare(name, params=params)
        )
        await self._frontend.validate_async(prepared)
        self._check_free(name)  # another call may have taken it meanwhile
        generation = self._calls[name] = Generation(self._own_client(), [prepared])
        sent = _Sent()
        try:
            await generation.start()
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for _, delta in deltas:
                    if delta.error is not None:
                        raise EngineError(delta.error, code=delta.error_code)
                    if delta.prompt_logprobs is not None:  # slow for a long prompt
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

    async def _pool(self, job: ScoringJob, call: ScoringCall) -> PooledVectors:
        name = self._name(call.request_id)
        run = self._calls[name] = ScoringRun(self._own_client(), job, call, name, self._threads)
        try:
            return await run.run()
        finally:
            del self._calls[name]

    def _own_client(self) -> EngineClient:
        """Return the client for the running event loop. Raises EngineError if it belongs to another that still runs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            with self._loop_lock:
                if self._loop is not None and self._loop.is_running():
                    raise EngineError(
                        "this engine is in use by another event loop: use it only from the loop that used it first "
                        "(asyncio.run_coroutine_threadsafe), or create an engine for each loop"
                    )
                self._loop = loop
        return self._client

    def _name(self, request_id: str | None) -> str:
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        self._check_free(name)
        return name

    def _check_free(self, name: str) -> None:
        if name in self._calls:
            raise RequestError(
                f"request id {name!r} is already in use", param="request_id", code="request_id_in_use"
            )

    async def abort(self, request_id: str) -> int:
        """Abort a request and return the number of KV blocks freed.

        Its stream ends with finish reason "abort"; calls without a stream raise EngineError.
        """
        self._own_client()
        call = self._calls.get(request_id)
        return 0 if call is None else await call.abort()

    async def describe(self, request_id: str) -> list[RequestState]:
        """Return the states of the answers to a request that is running or ended recently."""
        state = await self._own_client().describe(request_id)
        if state is not None:
            return [state]
        states = []
        for index in range(MAX_N):
            state = await self._own_client().describe(f"{request_id}/{index}")
            if state is None:
                break
            states.append(state)
        return states

    # ---- the engine ----

    @property
    def frontend(self) -> Frontend:
        """The text side, for code that makes requests itself."""
        return self._frontend

    @property
    def client(self) -> EngineClient:
        """The engine client, for code that reads deltas itself."""
        return self._client

    @property
    def facts(self) -> ModelFacts:
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer:
        if self._frontend.tokenizer is None:
            raise ConfigError("this engine has no tokenizer")
        return self._frontend.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._frontend.max_model_len

    async def stats(self) -> EngineStats:
        return await self._own_client().stats()

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        await self._own_client().command(ResetPrefixCache())

    async def sleep(self) -> None:
        """Free the KV memory and move the weights to host memory. Raises EngineError while there are requests."""
        await self._own_client().command(Sleep())

    async def wake_up(self) -> None:
        await self._own_client().command(WakeUp())

    async def is_sleeping(self) -> bool:
        return (await self._own_client().stats()).is_sleeping

    async def health(self) -> Health:
        return await self._own_client().health()

    async def close(self, drain: float = 0.0) -> None:
        """Stop the engine. Requests get up to `drain` seconds to finish; the remaining streams end with an error."""
        await self._own_client().close(drain)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._frontend.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncEngineArgs:
    """The options of an engine (those of `LLM`), for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self.config = EngineConfig.create(model, **options)


class AsyncLLM(AsyncEngine):
    """An engine in a thread of this process, with the interface of vLLM's class of that name."""

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **foreign: Any) -> AsyncLLM:  # noqa: ARG003
        """Load a model and wait for it. vLLM's other arguments only affect its logging and are ignored."""
        engine = cls.from_loaded(_load(engine_args.config, None))
        assert isinstance(engine, AsyncLLM)
        return engine

    async def get_tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self._frontend, self.tokenizer)

    async def check_health(self) -> None:
        """Raise EngineDeadError unless the engine is healthy."""
        health = await self._own_client().health()
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


async def _start_client(
    config: EngineConfig, routing: RouterConfig, process: ProcessConfig | None, progress: LoadProgress | None
) -> EngineClient:
    """Start an engine in its own process, or a router over several."""
    try:
        from inflight.engine.remote.process_client import ProcessClient
        from inflight.router.start import start_router
    except ImportError as error:
        raise ConfigError(
            f"an engine in its own process needs {error.name}: install inflight-llm[server]"
        ) from error
    if not routing.is_enabled:
        return await ProcessClient.start(config, process, progress)
    return await start_router(config, routing, process, progress)


def _load(config: EngineConfig, progress: LoadProgress | None) -> LoadedEngine:
    from inflight.loading.load import load_engine

    loaded = load_engine(config, progress)
    loaded.frontend.warm_up()
    return loaded


def _snapshot(output: RequestOutput) -> RequestOutput:
    """Return a copy that later tokens do not change."""
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
    """The parts of each answer that were already sent."""

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
