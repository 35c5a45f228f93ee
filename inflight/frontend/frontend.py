"""The text side of a model: what stands before an engine, near or far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig
from inflight.engine import ModelFacts
from inflight.errors import ConfigError
from inflight.frontend.input_processor import InputProcessor, Prompt
from inflight.frontend.output_processor import OutputProcessor
from inflight.frontend.pooling import PoolingProcessor, cannot
from inflight.frontend.pooling_inputs import PoolingInputs
from inflight.pooling import PoolingFacts, Task
from inflight.request import SamplingParams
from inflight.text import ChatTemplate, Tokenizer, encode_chat


@dataclass
class Frontend:
    """Tokenizer, validator and template of a model. It needs facts, but no weights."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    default_params: dict[str, Any]  # what the checkpoint's makers recommend
    generates: bool = field(default=True, kw_only=True)  # else the model has a head alone
    pooling: PoolingFacts | None = field(default=None, kw_only=True)  # of its head, where it has one

    @classmethod
    def of(cls, config: EngineConfig, facts: ModelFacts) -> Frontend:
        """Before an engine elsewhere, which told its facts."""
        folder = facts.tokenizer_folder
        tokenizer = None if folder is None else Tokenizer.load(Path(folder))
        input_processor = InputProcessor.create(
            tokenizer, facts.vocab_size, facts.max_model_len, facts.eos_token_ids, config.model.seed
        )
        return cls(
            config,
            tokenizer,
            input_processor,
            dict(facts.default_params),
            generates=facts.generates,
            pooling=facts.pooling,
        )

    @property
    def max_model_len(self) -> int:
        return self.input_processor.max_model_len

    def pooling_processor(self, task: Task) -> PoolingProcessor:
        """For models with a head. Raises RequestError where there is none to do the task."""
        if self.pooling is None:
            raise cannot(task, None, self.generates)
        return self._pooling_processor

    @cached_property
    def _pooling_processor(self) -> PoolingProcessor:
        assert self.pooling is not None
        vocab_size = self.input_processor.vocab_size
        inputs = PoolingInputs(self.pooling, self.tokenizer, vocab_size, self.max_model_len)
        return PoolingProcessor(self.pooling, inputs, self.generates)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and this engine runs without one")
        return ChatTemplate(self.tokenizer.chat_template, self.tokenizer.special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """A conversation's prompt, as text and token ids. What messages and tools spell is text, never a special
        token: those come from the template alone."""
        template = self.chat_template
        assert self.tokenizer is not None
        return encode_chat(
            template,
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        text: str | None = None,
        kind: str = "generate",
    ) -> OutputProcessor:
        """A prompt that passed all checks, with a request for each answer to it. `text` is that of a prompt that is
        given as token ids, where it is known."""
        if not self.generates:
            raise cannot("generate", self.pooling, generates=False)
        found, requests = self.input_processor.requests(
            request_id, prompt, params, priority, tenant, cache_salt, kind
        )
        return OutputProcessor(request_id, found if text is None else text, requests, self.tokenizer)

    def warm_up(self) -> None:
        """What the first constrained request would wait for: up to a second, so whoever serves does it at start."""
        if self.generates:
            self.input_processor.grammars.warm_up()

    def is_slow(self, params: SamplingParams) -> bool:
        """Whether `prepare` is no work for an event loop."""
        return isinstance(params, SamplingParams) and self.input_processor.is_slow(params)

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_params)

    def close(self) -> None:
        """End the processes that render templates."""
        if "chat_template" in self.__dict__:
            self.chat_template.close()
