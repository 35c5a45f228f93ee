"""An engine in this process, and what belongs to its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from inflight.config import EngineConfig
from inflight.engine import EngineCore, ModelFacts
from inflight.engine.sleep import asleep
from inflight.errors import EngineError
from inflight.execution.platforms import Platform
from inflight.frontend import Frontend
from inflight.loading.cores import policy_of
from inflight.loading.opened import model_name
from inflight.models.decoder import Decoder
from inflight.models.encoder import PoolingEncoder
from inflight.scheduling import Policy

BuildCore = Callable[[EngineConfig, Policy], EngineCore]
LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass
class LoadedEngine(Frontend):
    """An engine and what belongs to its model."""

    platform: Platform
    core: EngineCore
    model: Decoder | PoolingEncoder
    build_core: BuildCore
    end_ranks: Callable[[], object] | None = None  # of a model on several ranks
    fingerprint: str = ""  # of the checkpoint (`models/checkpoint.py`)

    @property
    def facts(self) -> ModelFacts:
        """What is to be known without holding the weights."""
        folder = None if self.tokenizer is None else self.tokenizer.folder
        limits, blocks = self.core.scheduler.limits, self.core.scheduler.blocks
        return ModelFacts(
            model=model_name(self.config),
            vocab_size=self.input_processor.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.input_processor.eos_token_ids,
            default_params=self.default_params,
            tokenizer_folder=None if folder is None else str(folder.absolute()),
            device=self.platform.describe(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            num_blocks=blocks.pool.num_blocks,
            block_size=blocks.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            generates=self.generates,
            pooling=self.pooling,
            fingerprint=self.fingerprint,
        )

    def use(self, **scheduler_options: Any) -> EngineCore:
        """Put another engine over the same weights and KV memory in place of this one, which must be idle: another
        policy, other limits. The memory of the one before is given back first."""
        if self.core.is_sleeping:
            raise asleep()
        if self.core.has_work:
            raise EngineError("the engine has requests: another one can take its place only when it is idle")
        config = replace(self.config, scheduler=replace(self.config.scheduler, **scheduler_options))
        policy = policy_of(config.scheduler)
        self.core.close()
        self.config = config
        self.core = self.build_core(config, policy)
        return self.core

    def close(self) -> None:
        """Give back memory and the processes that render templates and try grammars."""
        try:
            self.core.close()
        finally:
            if self.end_ranks is not None:
                self.end_ranks()
            super().close()
