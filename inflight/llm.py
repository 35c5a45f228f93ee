"""The synchronous engine: prompts in, outputs back, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.config import EngineConfig
from inflight.engine import EngineStats, StepObserver
from inflight.errors import ConfigError, EngineError, ParameterError, RequestError
from inflight.frontend import Assembler, Prompt, split_prompts
from inflight.loading import LoadedEngine, load_engine
from inflight.outputs import RequestOutput
from inflight.request import Request, SamplingParams
from inflight.text import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate.

    >>> llm = LLM(model="path/or/hub-id", max_num_batched_tokens=1024)
    >>> outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))
    >>> outputs[0].outputs[0].text

    Options are those of `ModelConfig`, `CacheConfig` and `SchedulerConfig`, by name.
    """

    def __init__(self, model: str, *, show_progress: bool = True, **options: Any) -> None:
        config = EngineConfig.create(model=model, **_drop_foreign(options))
        with _loading_bar(model, show_progress) as progress:
            self._engine: LoadedEngine = load_engine(config, progress)
        self._num_requests = 0

    # ---- generating ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        tenant: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt: text, a list of token ids, or {"prompt_token_ids": [...]}.

        Outputs come in the order of the prompts. If one prompt is refused, none is run.
        """
        items = split_prompts(prompts)
        params = self._params_for(items, sampling_params)
        jobs = []
        for index, (prompt, chosen) in enumerate(zip(items, params, strict=True)):
            try:
                jobs.append(
                    self._prepare(
                        prompt, chosen, priority[index] if priority else 0, tenant[index] if tenant else ""
                    )
                )
            except RequestError as error:
                if len(items) > 1:
                    error.add_note(f"in prompt {index} of {len(items)}")
                raise
        return self._run(jobs, use_tqdm)

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
        template, tokenizer = self._engine.chat_template, self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm)

    def _params_for(
        self, prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise ParameterError(
                f"there are {len(given)} sampling params for {len(prompts)} prompts: give one or as many"
            )
        return list(given)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, priority: int, tenant: str
    ) -> tuple[Assembler, list[Request]]:
        request_id = str(self._num_requests)
        self._num_requests += 1
        text, requests = self._engine.intake.requests(request_id, prompt, params, priority, tenant)
        return Assembler(request_id, text, requests, self._engine.tokenizer), requests

    def _run(self, jobs: list[tuple[Assembler, list[Request]]], show: bool) -> list[RequestOutput]:
        core = self._engine.core
        assemblers: dict[str, Assembler] = {}
        try:
            for assembler, requests in jobs:
                for request in requests:
                    core.add(request)
                    assemblers[request.request_id] = assembler
            with _generation_bar(len(assemblers), show) as advance:
                while core.has_work:
                    deltas = core.step()
                    for delta in deltas:
                        if assemblers[delta.request_id].push(delta):
                            deltas += core.abort(delta.request_id)[1]
                    advance(deltas)
        finally:  # after Ctrl-C or an error the engine is empty again, and can go on
            for request_id in assemblers:
                core.abort(request_id)
        outputs = [assembler.output() for assembler, _ in jobs]
        failed = [answer.error for output in outputs for answer in output.outputs if answer.error]
        if failed:
            raise EngineError(
                f"{len(failed)} of {len(assemblers)} requests failed; the first with: {failed[0]}"
            )
        return outputs

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

    def stats(self) -> EngineStats:
        return self._engine.core.stats()

    def observe(self, observer: StepObserver) -> None:
        """Call `observer` with the record of every step."""
        self._engine.core.observers.append(observer)

    def close(self) -> None:
        self._engine.core.close()


def _drop_foreign(options: dict[str, Any]) -> dict[str, Any]:
    """Options of other engines that mean nothing here, or only one thing."""
    options.pop("enforce_eager", None)  # steps on the CPU are never captured
    options.pop("disable_log_stats", None)
    options.pop("trust_remote_code", None)  # code in a model folder is never run
    if options.pop("tensor_parallel_size", 1) != 1:
        raise ConfigError("tensor_parallel_size must be 1: a model runs on one device")
    return options


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
