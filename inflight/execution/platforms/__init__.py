"""The seam between loading a model and the device it runs on: one class for each kind, chosen by `platform`."""

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
from inflight.execution.forward import StageLinks
from inflight.execution.packed_texts import TextRunner
from inflight.layers.kernels import Kernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.models.encoders.spec import EncoderSpec
from inflight.scheduling import Limits


class EncoderKernels(NamedTuple):
    layers: Kernels
    attention: SequenceAttention
    head: Kernels  # float32: a head is small, and what it returns is read to its last digits


class Platform(Protocol):
    """One device, and the parts that run best on it."""

    device: torch.device
    max_num_seqs: int  # unless asked for
    max_num_batched_tokens: int  # unless asked for
    pipeline_depth: int  # unless asked for
    target_step_ms: float  # where it is left to the device
    max_text_tokens: int  # of a step of an encoder, unless asked for

    def kernels_and_attention(
        self, spec: DecoderSpec, dtype: torch.dtype
    ) -> tuple[Kernels, AttentionBackend[Any]]:
        """Kernels and attention for a model whose weights are held as `dtype`."""

    def num_blocks(self, config: EngineConfig, decoder: Decoder, context: int) -> int:
        """KV blocks that fit beside the weights, which are loaded, and the largest step."""

    def step_sizes(self, max_tokens: int) -> Sequence[int]:
        """Tokens that steps with prompts are rounded up to, ascending; none where nothing is rounded."""

    def runner(
        self,
        config: EngineConfig,
        decoder: Decoder,
        num_blocks: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> Runner[Any]:
        """With `links`, of one stage of several."""

    def encoder_kernels(self, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:
        """For an encoder whose weights are held as `dtype`."""

    def encoder_runner(self, config: EngineConfig, encoder: PoolingEncoder, limits: Limits) -> TextRunner: ...

    def describe(self) -> str:
        """The device and what was chosen for it, in one line."""


def platform(device: str) -> Platform:
    """By name: "cpu", "cuda", "cuda:1", or "auto" for a GPU where there is one."""
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
        raise ConfigError(f"device is {device!r}: torch finds {torch.cuda.device_count()} such devices here")
    from inflight.execution.platforms.cuda import CudaPlatform

    return CudaPlatform(torch.device("cuda", int(index or 0)))
