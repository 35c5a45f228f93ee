"""Measure how well a model predicts a text, and how far its predictions are from those of a reference.

The text's own tokens are forced: each is scored under the distribution that the model computes from the tokens before
it, in windows that start anew. So a figure does not depend on sampling, and two models are compared on equal contexts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.execution import platforms
from inflight.execution.platforms import Platform
from inflight.layers.attention.backend import AttentionInputs
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.recurrent import StateInputs, allocate_states
from inflight.layers.torch_kernels import TorchKernels
from inflight.loading.checkpoint import (
    load_tokenizer,
    model_name,
    open_configured,
    plain_ids,
    plan_model,
)
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.footprint import num_bytes
from inflight.models.decoders.weights import load_decoder
from inflight.models.encoders.families import encoder_architecture

BLOCK_SIZE = 16
DEFAULT_WINDOW = 512  # tokens


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
    window: int = DEFAULT_WINDOW,
    max_tokens: int | None = None,
) -> Evaluation:
    """Score a text, or its first `max_tokens` tokens."""
    platform = platforms.platform(config.model.device)
    decoder, token_ids = _load(config, platform, text)
    token_ids = token_ids[:max_tokens]
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens: at least 2 are needed to score one")
    other = None
    if reference is not None:
        other, other_ids = _load(reference, platform, text)
        if other_ids[:max_tokens] != token_ids:
            raise ConfigError("the reference has another tokenizer: its predictions cannot be compared")
    window = min(window, decoder.spec.default_context)
    loss = other_loss = divergence = 0.0
    count = same = 0
    for ids in _windows(token_ids, window):
        ours, targets = _logprobs(decoder, ids), torch.tensor(ids[1:], device=decoder.device)[:, None]
        count += len(targets)
        loss -= ours.gather(1, targets).sum().item()
        if other is not None:
            theirs = _logprobs(other, ids)
            other_loss -= theirs.gather(1, targets).sum().item()
            divergence += (theirs.exp() * (theirs - ours)).nan_to_num(0.0).sum().item()
            same += int((ours.argmax(1) == theirs.argmax(1)).sum())
    agreement = None
    if other is not None:
        agreement = Agreement(math.exp(other_loss / count), divergence / count, same / count)
    return Evaluation(count, math.exp(loss / count), num_bytes(decoder), agreement)


def unquantized(config: EngineConfig) -> EngineConfig:
    """Return the same configuration without quantization while loading, and without a quantized KV cache."""
    model = replace(config.model, quantization=None, quantize_head=False)
    cache = replace(config.cache, kv_cache_dtype="auto", kv_cache_dtype_skip_layers=())
    return replace(config, model=model, cache=cache)


def _load(config: EngineConfig, platform: Platform, text: str) -> tuple[Decoder, list[int]]:
    """Return the model, and the text's tokens."""
    model, checkpoint = config.model, open_configured(config, config.model.load_format)
    name = model_name(config)
    if encoder_architecture(checkpoint.config) is not None:
        raise ConfigError(f"{name} is an encoder: it predicts no tokens")
    tokenizer = load_tokenizer(config, checkpoint)
    if tokenizer is None:
        raise ConfigError(f"{name} has no tokenizer: a text cannot be split into tokens")
    plan = plan_model(config, checkpoint, plain_ids(tokenizer))
    if not plan.spec.has_lm_head:
        raise ConfigError(f"{name} has no language-model head: it predicts no tokens")
    kernels, attention = platform.kernels_and_attention(plan.dtype)
    can_keep = config.cache.kv_cache_dtype in platform.defaults.kv_cache_dtypes
    if not can_keep or platform.device.type != "cpu":
        # Windows need no plans and graphs: plain attention over their tokens is fast enough. It has every type of KV.
        attention = ComposedAttention(
            TorchKernels(kernels.compute_dtype, platform.device), TorchCpuAttention()
        )
    decoder = load_decoder(
        checkpoint,
        kernels,
        attention,
        plan.dtype,
        platform.device,
        load_format=model.load_format,
        seed=model.seed,
        spec=plan.spec,
    )
    return decoder, list(tokenizer.encode(text))


def _windows(token_ids: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield runs of at most `size` tokens. The first of each run is only context."""
    for start in range(0, len(token_ids) - 1, size - 1):
        yield list(token_ids[start : start + size])


@torch.inference_mode()
def _logprobs(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """Return the log probabilities [n - 1, vocab_size] float64 of all tokens but the first."""
    device, count = decoder.device, len(token_ids)
    shape, num_blocks = decoder.kv_shape(BLOCK_SIZE), -(-count // BLOCK_SIZE)
    # Layers with different block tables share memory, so each table has blocks of its own.
    num_tables = len(shape.windows)
    caches = decoder.attention.allocate(shape, num_tables * num_blocks, device).layers
    states = allocate_states(decoder.state_sizes, [torch.zeros(1, 1, device=device)], 2)
    positions = torch.arange(count, device=device)
    blocks = torch.arange(num_tables * num_blocks, dtype=torch.int32, device=device)
    firsts = torch.arange(num_tables, device=device)[:, None] * (num_blocks * BLOCK_SIZE)
    inputs = AttentionInputs(
        positions=positions,
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        rows=torch.zeros(1, dtype=torch.int32, device=device),
        block_tables=blocks.view(num_tables, 1, num_blocks),
        slot_mapping=firsts + positions,
    )
    inputs.state = StateInputs(
        inputs.query_starts,
        torch.ones(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    ids = torch.tensor(token_ids, device=device)
    hidden = decoder.forward(ids, caches, inputs, None, states)
    return decoder.logits(hidden[:-1]).double().log_softmax(-1)
