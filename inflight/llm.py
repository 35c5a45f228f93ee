"""The synchronous engine: prompts in, outputs back, in order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.config import EngineConfig
from inflight.engine import EngineStats, StepObserver
from inflight.errors import ConfigError, EngineError, ParameterError, RequestError
from inflight.frontend import OutputProcessor, Prompt, split_prompts
from inflight.garbage import paused_collection
from inflight.interrupts import held_interrupts
from inflight.loading import LoadedEngine, load_engine
from inflight.outputs import RequestOutput
from inflight.request import SamplingParams
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
    `SchedulerConfig`, by name.
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, show_progress: bool = True, **options: Any
    ) -> None:
        config = EngineConfig.create(model, **options)
        with _loading_bar(config.model.model or "the built-in model", show_progress) as progress:
            self._engine: LoadedEngine = load_engine(config, progress)
        if progress is not None:
            Console(stderr=True).print(self._engine.platform.describe(), style="dim", highlight=False)
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
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _for_each(items, sampling_params, SamplingParams, "sampling params", "sampling_params")
        priorities = _for_each(items, priority, int, "priorities", "priority")
        tenants = _for_each(items, tenant, str, "tenants", "tenant")
        prepared = []
        for index, parts in enumerate(zip(items, params, priorities, tenants, strict=True)):
            try:
                prepared.append(self._prepare(*parts))
            except RequestError as error:
                if len(items) > 1:
                    error.add_note(f"in prompt {index} of {len(items)}")
                raise
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the checkpoint's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else list(messages)
        prompts = [
            self._engine.encode_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        outputs = self.generate([token_ids for _, token_ids in prompts], sampling_params, use_tqdm)
        for output, (text, _) in zip(outputs, prompts, strict=True):
            output.prompt = text
        return outputs

    def _prepare(self, prompt: Prompt, params: SamplingParams, priority: int, tenant: str) -> OutputProcessor:
        request_id = str(self._num_requests)
        self._num_requests += 1
        return self._engine.prepare(request_id, prompt, params, priority, tenant)

    def _run(self, prompts: list[OutputProcessor], show: bool) -> list[RequestOutput]:
        if self._closed:
            raise EngineError("this LLM was closed")
        core = self._engine.core
        by_id = {answer.request.request_id: prompt for prompt in prompts for answer in prompt.answers}
        with paused_collection(), held_interrupts() as let_go:
            try:
                for prompt in prompts:
                    for answer in prompt.answers:
                        core.add(answer.request)
                with _generation_bar(len(by_id), show) as advance:
                    while core.has_work:
                        let_go()  # between two steps, where all books are in order
                        deltas = core.step()
                        for delta in deltas:
                            if by_id[delta.request_id].push(delta):
                                deltas += core.abort(delta.request_id, "stop")[1]
                        advance(deltas)
            except BaseException:  # Ctrl-C above all
                self._clear(by_id)
                raise
        outputs = [prompt.output() for prompt in prompts]
        failed = [answer.error for output in outputs for answer in output.outputs if answer.error]
        if failed and len(failed) == len(by_id):
            raise EngineError(f"all {len(failed)} requests failed; the first with: {failed[0]}")
        if failed:
            logger.warning("%d of %d requests failed", len(failed), len(by_id))
        return outputs

    def _clear(self, request_ids: Iterable[str]) -> None:
        """Empty the engine after a run that broke off, so that it can go on."""
        core = self._engine.core
        for request_id in request_ids:
            core.abort(request_id)
        while core.has_work:  # what is still in flight
            core.step()
        # A step that was cut short has not filled the blocks that it promised to the prefix cache.
        core.scheduler.blocks.drop_cache()

    # ---- around it ----

    def get_tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise ConfigError("this engine runs without a tokenizer")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return self._engine.default_sampling_params()

    def get_default_sampling_fields(self) -> dict[str, Any]:
        """The same as fields, only those that it names: for callers who override some."""
        return dict(self._engine.default_params)

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self._engine.input_processor.vocab_size

    def stats(self) -> EngineStats:
        return self._engine.core.stats()

    def observe(self, observer: StepObserver) -> None:
        """Call `observer` with the record of every step."""
        self._engine.core.observers.append(observer)

    def unobserve(self, observer: StepObserver) -> None:
        self._engine.core.observers.remove(observer)

    def close(self) -> None:
        """Give back the memory. The engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _for_each(prompts: list[Prompt], given: T | Sequence[T], kind: type[T], name: str, param: str) -> list[T]:
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


def _loading_bar(model: str, show: bool) -> AbstractContextManager[Callable[[int, int], None] | None]:
    return _LoadingBar(model) if show and sys.stderr.isatty() else nullcontext()


class _LoadingBar(AbstractContextManager[Callable[[int, int], None]]):
    def __init__(self, model: str) -> None:
        self._progress = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(model, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda done, total: self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def _generation_bar(total: int, show: bool) -> AbstractContextManager[Callable[[Sequence[Any]], None]]:
    return _GenerationBar(total) if show and sys.stderr.isatty() else nullcontext(lambda _: None)


class _GenerationBar(AbstractContextManager[Callable[[Sequence[Any]], None]]):
    """Requests done, and output tokens a second."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, speed="")
        self._num_tokens = 0

    def __enter__(self) -> Callable[[Sequence[Any]], None]:
        self._progress.start()
        return self._advance

    def _advance(self, deltas: Sequence[Any]) -> None:
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        elapsed = self._progress.tasks[0].elapsed or 0.0
        speed = f"{self._num_tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
        done = sum(delta.finish_reason is not None for delta in deltas)
        self._progress.update(self._task, advance=done, speed=speed)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
