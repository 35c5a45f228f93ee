"""What `LLM` does with models that embed, classify or score."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar

from rich.console import Console

from inflight.config import EngineConfig, RouterConfig
from inflight.engine import Command, EngineStats, StepObserver
from inflight.engine.stats import MetricValue, metrics_of
from inflight.entrypoints.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from inflight.entrypoints.offline import LocalEngine, OfflineEngine, OfflineRun, ReplicatedEngine
from inflight.entrypoints.progress_bars import loading_bar
from inflight.errors import ConfigError, EngineError, ParameterError, RequestError, shown
from inflight.events import Delta
from inflight.frontend import (
    ChatRequest,
    ChatTokenizer,
    Frontend,
    OutputProcessor,
    Pair,
    PooledVectors,
    PoolingJob,
    PoolingProcessor,
    Prompt,
    RequestContext,
    ToolChoice,
    check_arguments,
    check_top_n,
    ranked,
    split_prompts,
)
from inflight.loading import load_engine
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
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.vllm_compat.python_api import LLM_METHODS


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


logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class LLM(PoolingCalls):
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
        show_progress &= bool(options.pop("use_tqdm_on_load", True))  # as vLLM has it
        routing = RouterConfig.taken_from(options)
        config = EngineConfig.create(model, **options)
        self._offline: OfflineEngine
        with loading_bar(config.model.model or "the built-in model", show_progress) as progress:
            if routing.is_wanted:
                self._offline = ReplicatedEngine(config, routing, progress)
            else:
                self._engine = load_engine(config, progress)  # there where it is in this process
                self._offline = LocalEngine(self._engine)
        self._frontend = self._offline.frontend
        if progress is not None:
            Console(stderr=True).print(self._offline.description, style="dim", highlight=False)
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
        **foreign: Any,
    ) -> list[RequestOutput]:
        """Answer every prompt: text, a list of token ids, or {"prompt_token_ids": [...]}.

        Parameters, priority (smaller first) and tenant are one for all prompts, or a list with one for each.
        Outputs come in the order of the prompts. If one prompt is refused, none is run. A request that fails
        while it runs fails alone, with finish reason "error"; only if all fail is EngineError raised. Arguments of vLLM
        that change nothing are taken (`vllm_compat/python_api.py`).
        """
        check_arguments(foreign)
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
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        tool_choice: ToolChoice | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        max_reasoning_tokens: int | None = None,
        **foreign: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the checkpoint's chat template.

        Of each answer, `message` has content, reasoning and tool calls apart; `message.as_dict()` is what to append to
        the conversation. Messages, tools and the choice among them are as in OpenAI's API: what is taken over HTTP is
        taken here. A reply is begun unless `continue_final_message`.
        """
        check_arguments(foreign)
        one = bool(messages) and not isinstance(messages[0], Sequence)
        conversations: Sequence[Any] = [messages] if one else list(messages)
        chats = [
            ChatRequest.of(
                conversation,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                reasoning_effort=reasoning_effort,
                max_reasoning_tokens=max_reasoning_tokens,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]

        def prepare(index: int, request_id: str, params: SamplingParams) -> OutputProcessor:
            return self._frontend.prepare_chat(request_id, chats[index], params)

        return self._run(self._prepare(chats, sampling_params, prepare), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        **foreign: Any,
    ) -> list[BeamSearchOutput]:
        """The likeliest ways to go on from each prompt. Every token is a run of the engine over all beams."""
        check_arguments(foreign)
        one_token = SamplingParams(max_tokens=1)
        prepared = [self._frontend.prepare("", prompt, one_token) for prompt in split_prompts(prompts)]
        found = beam_search(
            [prompt.prompt_token_ids for prompt in prepared],
            params,
            lambda beams, step: self.generate(beams, step, use_tqdm),
            self._frontend.input_processor.eos_token_ids,
            self.max_model_len,
        )
        tokenizer = self._frontend.tokenizer
        for sequence in (sequence for output in found for sequence in output.sequences):
            sequence.text = None if tokenizer is None else tokenizer.decode(sequence.tokens)
        return found

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
                self._frontend.validate(found[-1])
            except RequestError as error:
                if len(items) > 1:
                    error.add_note(f"in prompt {index} of {len(items)}")
                raise
        return found

    def _run(self, prompts: list[OutputProcessor], show: bool) -> list[RequestOutput]:
        by_id = {answer.request.request_id: prompt for prompt in prompts for answer in prompt.answers}
        requests = [answer.request for prompt in prompts for answer in prompt.answers]
        self._compute(
            OfflineRun(
                requests, len(requests), lambda delta: by_id[delta.request_id].push(delta), "generating"
            ),
            show,
        )
        outputs = [prompt.output() for prompt in prompts]
        failed = [answer.error for output in outputs for answer in output.outputs if answer.error]
        if failed and len(failed) == len(by_id):
            raise EngineError(f"all {len(failed)} requests failed; the first with: {failed[0]}")
        if failed:
            logger.warning("%d of %d requests failed", len(failed), len(by_id))
        return outputs

    def _compute(self, run: OfflineRun, show: bool) -> None:
        self._check_open()
        self._offline.compute(run, show)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM was closed")

    # ---- around it ----

    def get_tokenizer(self, lora_request: None = None) -> ChatTokenizer:
        """The checkpoint's, with the methods of transformers' tokenizers."""
        check_arguments({"lora_request": lora_request})
        if self._frontend.tokenizer is None:
            raise ConfigError("this engine runs without a tokenizer")
        return ChatTokenizer(self._frontend, self._frontend.tokenizer)

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
        return self._offline.stats()

    def get_metrics(self) -> list[MetricValue]:
        """What the engine counts, by the names that the server's /metrics has."""
        return metrics_of(self.stats())

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes. True, as vLLM says."""
        self._command("reset_prefix_cache")
        return True

    def sleep(self, level: int = 1) -> None:
        """Give up the KV memory, and put the weights into host memory, until `wake_up`."""
        if level != 1:
            raise ParameterError(
                f"level is {shown(level)}: it must be 1; weights are kept in host memory", param="level"
            )
        self._command("sleep")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if tags is not None:
            raise ParameterError(
                f"tags is {shown(tags)}: it must be None; all wakes up at once", param="tags"
            )
        self._command("wake_up")

    def is_sleeping(self) -> bool:
        return self.stats().is_sleeping

    def _command(self, command: Command) -> None:
        self._check_open()
        self._offline.command(command)

    def observe(self, observer: StepObserver) -> None:
        """Call `observer` with the record of every step; with replicas, in a thread of theirs."""
        self._offline.observe(observer)

    def unobserve(self, observer: StepObserver) -> None:
        self._offline.unobserve(observer)

    def close(self) -> None:
        """Give back the memory. The engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._offline.close()

    def __getattr__(self, name: str) -> Any:
        """What vLLM's has and this one has not is refused with what to do instead."""
        if name in LLM_METHODS:
            raise AttributeError(f"LLM has no {name}: {LLM_METHODS[name]}", name=name, obj=self)
        raise AttributeError(f"LLM has no {name}", name=name, obj=self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


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
