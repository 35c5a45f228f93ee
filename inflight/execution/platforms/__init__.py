"""The interface between loading a model and the device it runs on: one class per kind, chosen by `platform`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.sequences import SequenceAttention
from inflight.config import EngineConfig
from inflight.constraints import GrammarCompiler
from inflight.engine.runner import Runner
from inflight.errors import ConfigError
from inflight.execution.encoder_runner import TextRunner
from inflight.execution.forward import StageLinks
from inflight.layers.kernels import Kernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.models.encoders.spec import EncoderSpec
from inflight.scheduling import Limits


class EncoderKernels(NamedTuple):
    layers: Kernels
    attention: SequenceAttention
    head: Kernels  # float32: a head is small, and its output is used at full precision


class Platform(Protocol):
    """One device, with the implementations that run best on it."""

    device: torch.device
    max_num_seqs: int  # default
    max_num_batched_tokens: int  # default
    pipeline_depth: int  # default
    target_step_ms: float  # default
    max_text_tokens: int  # default size of a step of an encoder

    def kernels_and_attention(
        self, spec: DecoderSpec, dtype: torch.dtype
    ) -> tuple[Kernels, AttentionBackend[Any]]:
        """Return kernels and attention for a model whose weights are held as `dtype`."""

    def num_blocks(self, config: EngineConfig, decoder: Decoder, context: int) -> int:
        """Return the number of KV blocks that fit beside the loaded weights and the largest step."""

    def step_sizes(self, max_tokens: int) -> Sequence[int]:
        """Return the sizes, in tokens, that steps with prompts are rounded up to; empty if they are not rounded."""

    def runner(
        self,
        config: EngineConfig,
        decoder: Decoder,
        num_blocks: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> Runner[Any]:
        """Return a runner for the decoder; with `links`, for one stage of several."""

    def encoder_kernels(self, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:
        """Return kernels for an encoder whose weights are held as `dtype`."""

    def encoder_runner(self, config: EngineConfig, encoder: PoolingEncoder, limits: Limits) -> TextRunner: ...

    def describe(self) -> str:
        """Describe the device and what was chosen for it, in one line."""


def platform(device: str) -> Platform:
    """Return a platform by name: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one."""
    name = device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        from inflight.execution.platforms.cpu import CpuPlatform

        return CpuPlatform()
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index == "" or index.isdecimal()):
        raise ConfigError(f"device is {device!r}: allowed are 'auto', 'cpu', 'cuda' and 'cuda:<index>'")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device!r}: torch finds {torch.cuda.device_count()} CUDA devices")
    from inflight.execution.platforms.cuda import CudaPlatform

    return CudaPlatform(torch.device("cuda", int(index or 0)))
