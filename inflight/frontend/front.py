"""The text side of a model: what stands before an engine, near or far."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig
from inflight.engine import ModelFacts
from inflight.errors import ConfigError
from inflight.frontend.intake import Intake
from inflight.request import SamplingParams
from inflight.text import ChatTemplate, Tokenizer


@dataclass
class Front:
    """Tokenizer, validator and template of a model. It needs facts, but no weights."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    intake: Intake
    default_params: dict[str, Any]  # what the checkpoint's makers recommend

    @classmethod
    def of(cls, config: EngineConfig, facts: ModelFacts) -> Front:
        """Before an engine elsewhere, which told its facts."""
        folder = facts.tokenizer_folder
        tokenizer = None if folder is None else Tokenizer.load(Path(folder))
        intake = Intake.create(
            tokenizer, facts.vocab_size, facts.max_model_len, facts.eos_token_ids, config.model.seed
        )
        return cls(config, tokenizer, intake, dict(facts.default_params))

    @property
    def max_model_len(self) -> int:
        return self.intake.max_model_len

    @cached_property
    def chat_template(self) -> ChatTemplate:
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and this engine runs without one")
        return ChatTemplate(self.tokenizer.chat_template, self.tokenizer.special_tokens)

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_params)

    def close(self) -> None:
        """End the processes that render templates."""
        if "chat_template" in self.__dict__:
            self.chat_template.close()
