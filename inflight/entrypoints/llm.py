"""`LLM`: the synchronous Python API for offline inference."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, TypeVar
from weakref import finalize

from rich.console import Console

from inflight.config import EngineConfig, RouterConfig
from inflight.engine.client import ResetPrefixCache, Sleep, WakeUp
from inflight.engine.stats import ENGINE_METRICS, EngineStats, MetricValue
from inflight.entrypoints.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from inflight.entrypoints.offline import (
    LocalEngine,
    OfflineEngine,
    OfflineRun,
    ReplicatedEngine,
    forked,
    loading_bar,
)
from inflight.entrypoints.scoring import ScoringMethods
from inflight.errors import ConfigError, EngineError, ParameterError, RequestError
from inflight.frontend.agents.answer_grammar import ToolChoice
from inflight.frontend.chat import ChatRequest
from inflight.frontend.chat_tokenizer import ChatTokenizer
from inflight.frontend.input_processor import Prompt, check_arguments, split_prompts
from inflight.frontend.output_processor import OutputProcessor
from inflight.loading.load import load_engine
from inflight.outputs import RequestOutput
from inflight.request import RequestContext
from inflight.sampling_params import SamplingParams
from inflight.timeline.chunks import TimelineQuery
from inflight.timeline.steps import RecordedStep, read_chunks, recorded_steps
from inflight.vllm_names import LLM_METHODS

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class LLM(ScoringMethods):
    """A model for offline inference.

    >>> llm = LLM(model="path/or/hub-id", max_num_batched_tokens=1024)
    >>> outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))
    >>> outputs[0].outputs[0].text

    Without `model`, the built-in model is used. Options are the fields of `ModelConfig`, `CacheConfig` and
    `SchedulerConfig`. `replicas` starts that many engines, each in its own process, and allows the options of
    `RouterConfig`, such as `ray_address`; this needs inflight-llm[server].

    `record="run.json.gz"` writes a trace of everything that was run, for Perfetto's UI, when the LLM is closed.
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, show_progress: bool = True, **options: Any
    ) -> None:
        record: str | PathLike[str] | None = options.pop("record", None)
        show_progress &= bool(options.pop("use_tqdm_on_load", True))  # as in vLLM
        routing = RouterConfig.taken_from(options)
        config = EngineConfig.create(model, **options)
        self._offline: OfflineEngine
        with loading_bar(config.model.model or "the built-in model", show_progress) as progress:
            if routing.is_enabled:
                self._offline = ReplicatedEngine(config, routing, progress)
            else:
                self._engine = load_engine(config, progress)  # only for an engine in this process
                self._offline = LocalEngine(self._engine, record is not None)
        self._frontend = self._offline.frontend
        if progress is not None:
            Console(stderr=True).print(self._offline.description, style="dim", highlight=False)
        self._numbers = itertools.count()  # of requests: any thread may take the next
        self._rendering = threading.Lock()  # templates would refuse to wait long for other threads' chats
        # Also called when the interpreter exits, if no one closes this.
        self._write_record = finalize(self, _write_record, self._offline, record)

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

        Parameters, priority (smaller first) and tenant may be lists with one for each prompt. Outputs are in the order
        of the prompts. If one prompt is rejected, none is run. A request that fails gets the finish reason "error";
        EngineError is raised only if all requests fail. Arguments of vLLM that would change nothing are
        accepted (`vllm_names.py`).
        """
        check_arguments(foreign)
        items = split_prompts(prompts)
        priorities = _for_each(items, priority, int, "priorities", "priority")
        tenants = _for_each(items, tenant, str, "tenants", "tenant")
        rows = [*zip(items, priorities, tenants, strict=True)]

        def prepare(index: int, request_id: str, params: SamplingParams) -> OutputProcessor:
            prompt, priority, tenant = rows[index]
            return self._frontend.prepare(request_id, prompt, params, RequestContext(priority, tenant))

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

        An answer's `message` has content, reasoning and tool calls; append `message.as_dict()` to the conversation.
        Messages, tools and tool_choice are those of OpenAI's API, checked as over HTTP. A generation prompt is
        added unless `continue_final_message`.
        """
        check_arguments(foreign)
        one = bool(messages) and not isinstance(messages[0], Sequence)
        conversations: Sequence[Any] = [messages] if one else list(messages)
        chats = [
            ChatRequest.from_messages(
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
            with self._rendering:
                return self._frontend.prepare_chat(request_id, chats[index], params)

        return self._run(self._prepare(chats, sampling_params, prepare), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        **foreign: Any,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt. Every token is one run of the engine over all beams."""
        check_arguments(foreign)
        one_token = SamplingParams(max_tokens=1)
        prepared = [self._frontend.prepare("", prompt, one_token) for prompt in split_prompts(prompts)]
        outputs = beam_search(
            [prompt.prompt_token_ids for prompt in prepared],
            params,
            lambda beams, step: self.generate(beams, step, use_tqdm),
            self._frontend.input_processor.eos_token_ids,
            self.max_model_len,
        )
        tokenizer = self._frontend.tokenizer
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            sequence.text = None if tokenizer is None else tokenizer.decode(sequence.tokens)
        return outputs

    def _prepare(
        self,
        items: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Callable[[int, str, SamplingParams], OutputProcessor],
    ) -> list[OutputProcessor]:
        """Prepare and validate all prompts. If one is rejected, the error says which."""
        if self._offline.is_forked:  # first: threads of the parent may have had locks that this needs
            raise forked()
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        prepared = []
        params = _for_each(items, sampling_params, SamplingParams, "sampling params", "sampling_params")
        for index, item_params in enumerate(params):
            try:
                prepared.append(prepare(index, str(next(self._numbers)), item_params))
                self._frontend.validate(prepared[-1])
            except RequestError as error:
                if len(items) > 1:
                    error.add_note(f"in prompt {index} of {len(items)}")
                raise
        return prepared

    def _run(self, prompts: list[OutputProcessor], show: bool) -> list[RequestOutput]:
        by_id = {answer.request.request_id: prompt for prompt in prompts for answer in prompt.answers}
        requests = [answer.request for prompt in prompts for answer in prompt.answers]
        self._compute(
            OfflineRun(requests, len(requests), lambda request_id: by_id[request_id].push, "generating"), show
        )
        outputs = [prompt.output() for prompt in prompts]
        failed = [answer.error for output in outputs for answer in output.outputs if answer.error]
        if failed and len(failed) == len(by_id):
            raise EngineError(f"all {len(failed)} requests failed; the first with: {failed[0]}")
        if failed:
            logger.warning("%d of %d requests failed", len(failed), len(by_id))
        return outputs

    def _compute(self, run: OfflineRun, show: bool) -> None:
        self._offline.compute(run, show)

    # ---- the engine ----

    def get_tokenizer(self, lora_request: None = None) -> ChatTokenizer:
        """Return the checkpoint's tokenizer, with the methods of transformers' tokenizers."""
        check_arguments({"lora_request": lora_request})
        if self._frontend.tokenizer is None:
            raise ConfigError("this engine has no tokenizer")
        return ChatTokenizer(self._frontend, self._frontend.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the checkpoint's generation_config.json."""
        return self._frontend.default_sampling_params()

    def get_default_sampling_fields(self) -> dict[str, Any]:
        """Return only the fields that generation_config.json sets, for callers who override some."""
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
        """Return the engine's metrics under the names that the server's /metrics uses."""
        stats = self.stats()
        return [MetricValue(f"inflight:{item.name}", item.kind, item.read(stats)) for item in ENGINE_METRICS]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns True, as vLLM does."""
        self._offline.command(ResetPrefixCache())
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the KV memory and move the weights to host memory until `wake_up`."""
        if level != 1:
            raise ParameterError.of_value("level", level, "it must be 1 (weights are kept in host memory)")
        self._offline.command(Sleep())

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if tags is not None:
            raise ParameterError.of_value("tags", tags, "it must be None (everything wakes up at once)")
        self._offline.command(WakeUp())

    def is_sleeping(self) -> bool:
        return self.stats().is_sleeping

    @contextmanager
    def recorded(self) -> Iterator[list[RecordedStep]]:
        """Record the steps of a block. They are in the list when the block has ended.

            with llm.recorded() as steps:
                llm.generate(prompts)
            print(max(step.num_running for step in steps))

        Steps that other threads cause meanwhile are among them. Use one such block at a time.
        """
        steps: list[RecordedStep] = []
        began_at = time.monotonic()  # the clock of engines
        self._offline.record(True)
        try:
            yield steps
        finally:
            chunks = list(read_chunks(self._offline.read_timeline, TimelineQuery(began_at)))
            self._offline.record(False)
            steps += recorded_steps(chunks, began_at)

    def close(self) -> None:
        """Free the memory. The engine cannot be used afterwards."""
        self._write_record()
        self._offline.close()

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for methods that only vLLM's LLM has, it says what to use instead."""
        if name in LLM_METHODS:
            raise AttributeError(f"LLM has no {name}: {LLM_METHODS[name]}", name=name, obj=self)
        raise AttributeError(f"LLM has no {name}", name=name, obj=self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _write_record(offline: OfflineEngine, path: str | PathLike[str] | None) -> None:
    """Write the trace of an engine that is about to be closed, if there is a path for it."""
    if path is None or offline.is_forked:
        return
    from inflight.timeline.trace import read_recording, write_recording

    write_recording(read_recording(offline.read_timeline, time.time() - time.monotonic()), path)


def _for_each(
    prompts: Sequence[Any], value: T | Sequence[T], item_type: type[T], name: str, param: str
) -> list[T]:
    """Return one value for each prompt, from one for all or from a list."""
    if isinstance(value, item_type):
        return [value] * len(prompts)
    if not isinstance(value, Sequence):
        raise ParameterError(
            f"{name} are of type {type(value).__name__}: give a {item_type.__name__}, or a list of them",
            param=param,
        )
    if len(value) != len(prompts):
        raise ParameterError(
            f"there are {len(value)} {name} for {len(prompts)} prompts: give one, or one for each prompt",
            param=param,
        )
    return list(value)
