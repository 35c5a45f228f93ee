"""The description of a decoder as data, so that the decoder itself knows no model family by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from inflight.layers.rotary import Rope


class NormPlacement(Enum):
    """Where a layer normalises: before attention and MLP, after them, or both."""

    PRE = "pre"
    POST = "post"
    BOTH = "both"

    @property
    def before(self) -> bool:
        return self is not NormPlacement.POST

    @property
    def after(self) -> bool:
        return self is not NormPlacement.PRE


class QKNorm(Enum):
    """How queries and keys are normalised: not at all, each head, or the whole projection at once."""

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How a checkpoint names its tensors.

    `layer` maps the modules inside a layer to targets in the decoder's (`layer.py`): "attention.qkv.k" is the part "k"
    of the packed linear layer "qkv" of attention, "attention.qkv" all of it.
    """

    layer: Mapping[str, str]
    prefixes: tuple[str, ...] = ("model.",)  # the first that the checkpoint has an embedding under
    heads: tuple[str, ...] = ("lm_head.weight",)  # the output head, one for each prefix
    classifier: str = "score.weight"  # the head of a model that classifies
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)  # patterns of tensors that are not needed


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with rotary positions, RMS norms and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]  # a layer: tokens it sees, itself included; None: all before it
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]  # a layer: index into ropes
    max_position: int  # the longest context the checkpoint is meant for
    default_context: int  # what to serve when nothing else is asked
    norm_eps: float
    norm_placement: NormPlacement
    norm_offset: float  # added to every norm weight: 1 where checkpoints hold the difference from 1
    qk_norm: QKNorm
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: str
    attention_scale: float
    embedding_scale: float
    logit_softcap: float | None
    tied_embeddings: bool
    names: WeightNames
    has_lm_head: bool = True
    num_labels: int = 0  # of its classification head; 0: it has none

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
