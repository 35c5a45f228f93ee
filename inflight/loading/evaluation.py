"""Measure how well a model predicts a text, and how far its predictions are from those of a reference.

The text's own tokens are forced: each is scored under the distribution that an engine computes from the tokens before
it, in windows that start anew. So a figure does not depend on sampling, and two models are compared on equal contexts.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.config import EngineConfig, SchedulerConfig
from inflight.errors import ConfigError, EngineError
from inflight.execution import platforms
from inflight.execution.platforms import CpuPlatform, Platform
from inflight.kv.budget import most_blocks
from inflight.layers.attention.backend import AttentionBackend
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.kernels import Kernels
from inflight.layers.native_kernels import cpu_kernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.loading.checkpoint import OpenModel, model_name
from inflight.loading.engine import decoder_core, policy_of
from inflight.loading.load import fill_decoder, grammar_compiler
from inflight.models.decoders.footprint import num_bytes
from inflight.request import MAX_SCORED_CHUNK, Request
from inflight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a model's predictions differ from those of a reference, over the same tokens."""

    perplexity: float  # of the reference
    divergence: float  # the mean KL divergence of the model's distribution from the reference's, in nats
    top_1: float  # the share of tokens at which both have the same most likely token


@dataclass(frozen=True, slots=True)
class Evaluation:
    num_tokens: int  # that were scored
    perplexity: float
    weight_bytes: int
    agreement: Agreement | None = None  # None: there is no reference


def evaluate(
    config: EngineConfig,
    text: str,
    reference: EngineConfig | None = None,
    window: int = 512,
    max_tokens: int | None = None,
) -> Evaluation:
    """Score a text, or its first `max_tokens` tokens."""
    platform: Platform = platforms.platform(config.model.device)
    if config.cache.kv_cache_dtype not in platform.defaults.kv_cache_dtypes:
        platform = _AnyKVPlatform()
    with ExitStack() as engines:

        def load(config: EngineConfig) -> _ScoringEngine:
            return engines.enter_context(closing(_ScoringEngine(config, platform, text, window)))

        engine = load(config)
        token_ids = engine.token_ids[:max_tokens]
        if len(token_ids) < 2:
            raise ConfigError(f"the text has {len(token_ids)} tokens: at least 2 are needed to score one")
        other = None if reference is None else load(reference)
        if other is not None and other.token_ids[:max_tokens] != token_ids:
            raise ConfigError("the reference has another tokenizer: its predictions cannot be compared")
        window = min(model.window for model in (engine, other) if model is not None)
        loss = other_loss = divergence = 0.0
        count = same = 0
        for start in range(0, len(token_ids) - 1, window - 1):
            ids = token_ids[start : start + window]  # the first is only context
            ours = engine.logprobs(ids)
            targets = torch.tensor(ids[1:], device=ours.device)[:, None]
            count += len(targets)
            loss -= ours.gather(1, targets).sum().item()
            if other is not None:
                theirs = other.logprobs(ids)
                other_loss -= theirs.gather(1, targets).sum().item()
                divergence += (theirs.exp() * (theirs - ours)).nan_to_num(0.0).sum().item()
                same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        agreement = None
        if other is not None:
            agreement = Agreement(math.exp(other_loss / count), divergence / count, same / count)
        return Evaluation(count, math.exp(loss / count), num_bytes(engine.decoder), agreement)


def unquantized(config: EngineConfig) -> EngineConfig:
    """Return the same configuration without quantization while loading, and without a quantized KV cache."""
    model = replace(config.model, quantization=None, quantize_head=False)
    cache = replace(config.cache, kv_cache_dtype="auto", kv_cache_dtype_skip_layers=())
    return replace(config, model=model, cache=cache)


class _AnyKVPlatform(CpuPlatform):
    """A CPU that can keep keys and values in every type: its attention is computed in plain torch."""

    def kernels_and_attention(self, dtype: torch.dtype) -> tuple[Kernels, AttentionBackend[Any]]:  # noqa: ARG002
        return cpu_kernels(), ComposedAttention(TorchKernels(), TorchCpuAttention())


class _ScoringEngine:
    """A model in an engine that computes one window of a text at a time, and the text's tokens."""

    def __init__(self, config: EngineConfig, platform: Platform, text: str, window: int) -> None:
        model, name = OpenModel.open(config), model_name(config)
        if model.is_encoder:
            raise ConfigError(f"{name} is an encoder: it predicts no tokens")
        if model.tokenizer is None:
            raise ConfigError(f"{name} has no tokenizer: a text cannot be split into tokens")
        plan = model.plan()
        if not plan.spec.has_lm_head:
            raise ConfigError(f"{name} has no language-model head: it predicts no tokens")
        self.token_ids = list(model.tokenizer.encode(text))
        self.window = min(window, plan.spec.default_context)
        self.decoder = decoder = fill_decoder(model, platform, plan)
        # Neither graphs nor cached prefixes: they pay off only for many requests.
        config = replace(
            config,
            model=replace(config.model, enforce_eager=True),
            cache=replace(config.cache, enable_prefix_caching=False),
            scheduler=SchedulerConfig(
                max_num_seqs=1, max_num_batched_tokens=MAX_SCORED_CHUNK, pipeline_depth=1
            ),
        )
        layout = decoder.kv_shape(config.cache.block_size).layout
        num_blocks = most_blocks(layout, 1, self.window, MAX_SCORED_CHUNK)
        grammars = grammar_compiler(model, platform, plan.spec.vocab_size)
        policy = policy_of(config.scheduler)
        self._core = decoder_core(platform, decoder, None, num_blocks, self.window, grammars, config, policy)

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """Return the log probabilities [n - 1, vocab_size] float64 of all tokens but the first."""
        pieces: list[Tensor] = []
        runner: Any = self._core.runner
        runner.scored.read_logits = lambda logits: pieces.append(logits.double().log_softmax(-1))
        params = SamplingParams(prompt_logprobs=0)
        self._core.add(Request.create("window", token_ids, params, 0, task="prompt_logprobs"))
        while self._core.has_work:
            for delta in self._core.step():
                if delta.error is not None:
                    raise EngineError(delta.error)
        return torch.cat(pieces)

    def close(self) -> None:
        self._core.close()
