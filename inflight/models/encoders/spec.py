"""The description of an encoder as data, so that the encoder itself knows no model family by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.layers.rotary import Rope


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """How a checkpoint names its tensors, each less ".weight" and ".bias".

    `layer` maps the modules inside a layer to targets in the encoder's (`encoder.py`): "qkv.k" is the part "k" of the
    packed linear layer "qkv", "qkv" all of it.
    """

    layer: Mapping[str, str]
    layers: str  # precedes the index of a layer
    prefixes: tuple[str, ...]  # the first under which the checkpoint has its token embeddings
    tokens: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    segments: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    final_norm: str = ""
    # Patterns of the heads' tensors, which are ignored if another head is used.
    heads: tuple[str, ...] = ()
    # Patterns of tensors that are never needed.
    ignored: tuple[str, ...] = (r"embeddings\.position_ids$",)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One transformer with bidirectional attention and layer norms."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_positions: int  # rows of the position embedding; 0: there is none
    first_position: int  # the row of a text's first token
    num_segments: int  # rows of the segment embedding; 0: there is none
    max_position: int  # the longest text that the checkpoint supports
    windows: tuple[int | None, ...]  # by layer: how far a token sees to either side; None: everywhere
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int | None, ...]  # by layer: index into ropes
    norm_eps: float
    norm_first: bool  # whether layers normalise before attention and MLP, rather than the sum after them
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    gated: bool
    activation: str
    names: EncoderNames

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def has_attention_norm(self, index: int) -> bool:
        """Return whether a layer has this norm: with norms first, layer 0 reads the embedding's normalised output."""
        return index > 0 or not self.norm_first
