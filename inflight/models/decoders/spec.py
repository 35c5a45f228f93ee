"""The description of a decoder as data, so that the decoder itself knows no model family by name; and of a rank's part.

Tensor parallel ranks of one pipeline stage have the same layers, but different attention heads, MLP features and parts
of the vocabulary. Pipeline stages have different layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import PLAIN, PlainFormat, Scheme, WeightFormat
from inflight.layers.formats.schemes import common_scheme
from inflight.layers.kernels import ExpertRouting
from inflight.layers.recurrent import DeltaNetShape
from inflight.layers.rotary import Rope
from inflight.models.quantization import UNQUANTIZED, Quantization
from inflight.models.tensors import StoredTensor


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


IGNORED = (r"rotary_emb\.inv_freq$",)

# Targets of the experts' matrices: those that are held together, and the others.
EXPERTS_GATE_UP = ("mlp.experts.gate", "mlp.experts.up", "mlp.experts.gate_up")
EXPERTS_DOWN = "mlp.experts.down"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How a checkpoint names its tensors.

    `layer` maps the modules inside a layer to targets in the decoder's: "attention.qkv.k" is the part "k" of the packed
    linear layer "qkv" of attention, "attention.qkv" all of it. Modules whose target a layer does not have are skipped.

    `experts` are the layouts in which checkpoints hold routers and experts, and likewise map names to targets. A name
    with "{}" is that of a module, once for each expert; others are names of tensors that hold all experts.
    """

    layer: Mapping[str, str]
    experts: tuple[Mapping[str, str], ...] = ({},)
    prefixes: tuple[str, ...] = ("model.",)  # the first that the checkpoint has an embedding under
    layers: str = "layers"  # after the prefix: what the layers are in
    heads: tuple[str, ...] = ("lm_head.weight",)  # the output head, one for each prefix
    classifier: str = "score.weight"  # the head of a model that classifies
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm"  # less ".weight"
    ignored: tuple[str, ...] = IGNORED  # patterns of tensors that are not needed


@dataclass(frozen=True, slots=True)
class DenseMlpSpec:
    """A gated MLP."""

    inner: int  # features
    activation: str
    bias: bool = False

    def step_features(self, hidden: int) -> int:  # noqa: ARG002
        """Return the number of intermediate features of a token that are in memory at once."""
        return 3 * self.inner  # gate and up, and their product


@dataclass(frozen=True, slots=True)
class ExpertsMlpSpec:
    """Experts, of which each token uses a few, and a shared MLP that all tokens use."""

    inner: int  # features of one expert
    activation: str
    routing: ExpertRouting
    bias: bool = False
    limit: float = 0.0  # of the clamped activation
    shared_inner: int = 0  # 0: there is no shared MLP
    has_shared_gate: bool = False  # whether each token scales the shared MLP's output
    # Whether the router, the experts and the shared MLP have norms of their own, before and after them.
    has_own_norms: bool = False

    def step_features(self, hidden: int) -> int:
        """Return the number of intermediate features of a token that are in memory at once."""
        return max(3 * self.shared_inner, self.routing.top_k * (self.inner + hidden))


MlpSpec = DenseMlpSpec | ExpertsMlpSpec


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over the keys and values of earlier tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies the scores
    rope: Rope | None  # None: queries and keys are not rotated
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False  # whether each head has a learned term in the denominator of the softmax
    softcap: float | None = None  # the largest size of a score, approached smoothly; None: there is no limit
    has_gate: bool = False  # whether the query projection also yields gates of the heads' outputs
    value_norm: bool = False  # whether values are normalised, without a weight
    values_are_keys: bool = False  # whether values are the projected keys, before norm and rotation
    quantized_kv: str | None = None  # how the KV cache holds it, "fp8" or "int8"; None: as computed
    # The layer whose keys and values it reads, with heads and window like its own; None: it has its own.
    kv_source: int | None = None

    @property
    def has_kv(self) -> bool:
        return self.kv_source is None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def step_features(self) -> int:
        """The number of intermediate features of a token that are in memory at once."""
        return (2 + self.has_gate) * self.query_size + 2 * self.kv_size * self.has_kv


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """Inputs of each layer: an embedding of the token for every layer, plus a projection of the usual one."""

    size: int  # features
    activation: str  # of the gates through which a layer reads them

    @property
    def embedding_scale(self) -> float:
        scale: float = self.size**0.5
        return scale


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net, which keeps a state of fixed size instead of keys and values."""

    shape: DeltaNetShape

    @property
    def step_features(self) -> int:
        """The number of intermediate features of a token that are in memory at once."""
        shape = self.shape
        keys = shape.num_value_heads * shape.key_dim
        return shape.projected_size + shape.conv_size + keys + 2 * shape.value_size


MixerSpec = AttentionSpec | DeltaNetSpec


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with RMS norms and gated MLPs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mixers: tuple[MixerSpec, ...]  # of each layer: the part in which tokens learn of earlier ones
    mlps: tuple[MlpSpec, ...]  # of each layer
    max_position: int  # the longest context the checkpoint is meant for
    default_context: int  # served unless max_model_len is set
    norm_eps: float
    norm_placement: NormPlacement
    norm_offset: float  # added to every norm weight: 1 where checkpoints hold the difference from 1
    embedding_scale: float
    logit_softcap: float | None
    tied_embeddings: bool
    names: WeightNames
    has_lm_head: bool = True
    num_labels: int = 0  # of its classification head; 0: it has none
    attention_output_scale: float = (
        1.0  # multiplies the output of attention before it is added to the residual
    )
    logit_divisor: float = 1.0
    has_layer_scales: bool = (
        False  # whether each layer multiplies the residual by a learned number at its end
    )
    layer_inputs: LayerInputsSpec | None = None
    # Whether tensor parallel ranks hold some of the experts, instead of some features of each.
    expert_parallel: bool = False
    quantization: Quantization = UNQUANTIZED

    def format_of(self, module: str) -> WeightFormat:
        """Return the format of a module's weights; "{}" in its name stands for any expert."""
        return self.quantization.format_of(*self._names_of(module))

    def plain_experts(self, module: str) -> frozenset[int]:
        """Return the experts whose weights are plain whatever the format is."""
        return self.quantization.plain_experts(*self._names_of(module))

    def as_stored(self, stored: Mapping[str, StoredTensor]) -> DecoderSpec:
        """Return the same with what the tensors in the checkpoint's files decide."""
        return replace(self, quantization=self.quantization.as_stored(stored))

    def _names_of(self, module: str) -> list[str]:
        return [prefix + module for prefix in self.names.prefixes]

    @property
    def head_format(self) -> WeightFormat:
        """The format of the LM head. Most checkpoints store tied embeddings as they are."""
        if self.tied_embeddings and self.quantization.embeddings:
            return self.format_of(self.names.embedding.removesuffix(".weight"))
        weights = self.quantization.format_of(*(name.removesuffix(".weight") for name in self.names.heads))
        return weights if not self.tied_embeddings or isinstance(weights, PlainFormat) else PLAIN

    def scheme(self, layer: int, *targets: str) -> Scheme | None:
        """Return how a linear layer or matrices of the experts, which pack these targets, hold their weights: quantized
        if all modules that are loaded into them are, and in ways that fit together."""
        modules = [
            f"{self.names.layers}.{layer}.{module}"
            for names in (self.names.layer, *self.names.experts)
            for module, own in names.items()
            if f"{own}.".startswith(tuple(f"{target}." for target in targets))
        ]
        if any(map(self.plain_experts, modules)):
            return None
        return common_scheme(self.format_of(module).scheme for module in modules if self._may_have(module))

    def _may_have(self, module: str) -> bool:
        return self.quantization.may_have(*self._names_of(module))

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return len(self.attentions) < self.num_layers

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has any."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec))

    @property
    def kv_layers(self) -> dict[int, AttentionSpec]:
        """The attention of each layer that keeps keys and values, by the layer's index."""
        return {
            index: mixer
            for index, mixer in enumerate(self.mixers)
            if isinstance(mixer, AttentionSpec) and mixer.has_kv
        }


class Collective(Protocol):
    """Collective operations of the ranks of one stage. All ranks make the same calls in the same order."""

    @property
    def capturable(self) -> bool:
        """Whether a step that uses it can be captured in a CUDA graph."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, added in rank order: bit-identical on each rank. May overwrite x."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks side by side, [n, sum of widths] float32."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the `whole` decoder that a rank holds, as ranges of the whole."""

    whole: DecoderSpec
    rank: int
    size: int
    layers: range
    vocab: range
    collective: Collective | None = None  # None: the stage has one rank

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage turns hidden states into tokens or vectors."""
        return self.layers.stop == self.whole.num_layers

    @property
    def spec(self) -> DecoderSpec:
        """The decoder that this rank computes; only its vocabulary and MLPs are those of the whole."""
        whole, layers = self.whole, slice(self.layers.start, self.layers.stop)
        mixers = tuple(self.mixer(mixer) for mixer in whole.mixers[layers])
        return replace(whole, mixers=mixers, mlps=whole.mlps[layers])

    def part(self, count: int) -> range:
        """Return this rank's share of `count` features."""
        return _part(count, self.rank, self.size)

    def mixer(self, whole: MixerSpec) -> MixerSpec:
        """Return the part of a layer's mixer that this rank computes."""
        return self.attention(whole) if isinstance(whole, AttentionSpec) else self.delta_net(whole)

    def delta_net(self, whole: DeltaNetSpec) -> DeltaNetSpec:
        shape = whole.shape
        num_key_heads, num_value_heads = shape.num_key_heads // self.size, shape.num_value_heads // self.size
        return DeltaNetSpec(replace(shape, num_key_heads=num_key_heads, num_value_heads=num_value_heads))

    def attention(self, whole: AttentionSpec) -> AttentionSpec:
        """Return the part of a layer's attention that this rank computes."""
        num_kv_heads = len(self.kv_heads(whole))
        return replace(whole, num_heads=len(self.query_heads(whole)), num_kv_heads=num_kv_heads)

    def query_heads(self, whole: AttentionSpec) -> range:
        return self.part(whole.num_heads)

    def kv_heads(self, whole: AttentionSpec) -> range:
        """Return this rank's key and value heads. With fewer heads than ranks, neighbouring ranks have the same one."""
        count = whole.num_kv_heads
        if count % self.size == 0:
            return self.part(count)
        return _part(count, self.rank * count // self.size, count)

    def kv_copies(self, whole: AttentionSpec) -> int:
        """Return the number of ranks that have the same key and value heads."""
        return max(1, self.size // whole.num_kv_heads)

    @property
    def vocab_sizes(self) -> list[int]:
        """The number of tokens of each rank."""
        return [len(_part(self.whole.vocab_size, rank, self.size)) for rank in range(self.size)]


def check_tensor_parallel(spec: DecoderSpec, size: int) -> None:
    """Raise if the model cannot be split across `size` ranks."""
    for heads, kv_heads in {(layer.num_heads, layer.num_kv_heads) for layer in spec.attentions}:
        if heads % size or (kv_heads % size and size % kv_heads):
            fitting = [
                n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
            ]
            raise ConfigError(
                f"tensor_parallel_size is {size}: the model has {heads} attention heads and {kv_heads} key/value "
                f"heads, which can be split across {', '.join(map(str, fitting))} ranks"
            )
    for key_heads in {m.shape.num_key_heads for m in spec.mixers if isinstance(m, DeltaNetSpec)}:
        if key_heads % size:
            raise ConfigError(
                f"tensor_parallel_size is {size}: it must divide the number of key heads of the model's delta nets, "
                f"{key_heads}"
            )
    inner = min(_num_parts(spec, mlp) for mlp in spec.mlps)
    if min(inner, spec.vocab_size) < size:
        kind = "experts" if spec.expert_parallel else "inner features"
        raise ConfigError(
            f"tensor_parallel_size is {size}: the model has {inner} {kind} and {spec.vocab_size} tokens, and every "
            "rank needs at least one of each"
        )


def _num_parts(spec: DecoderSpec, mlp: MlpSpec) -> int:
    """Return the largest number of parts that an MLP can be split into."""
    if isinstance(mlp, DenseMlpSpec):
        return mlp.inner
    parts = mlp.routing.num_experts if spec.expert_parallel else mlp.inner
    return min(parts, mlp.shared_inner or parts)


def whole_shard(spec: DecoderSpec) -> Shard:
    """Return the shard that holds the whole decoder."""
    return shard_of(spec, 0, 1)


def shard_of(
    spec: DecoderSpec,
    rank: int,
    size: int,
    layers: range | None = None,
    collective: Collective | None = None,
) -> Shard:
    """Return the shard of rank `rank` of `size` in the stage that has `layers`, by default all."""
    check_tensor_parallel(spec, size)
    layers = range(spec.num_layers) if layers is None else layers
    return Shard(spec, rank, size, layers, _part(spec.vocab_size, rank, size), collective)


def _part(count: int, rank: int, size: int) -> range:
    """Return an even share of `count`; the first ranks get one more where it does not divide."""
    base, more = divmod(count, size)
    first = rank * base + min(rank, more)
    return range(first, first + base + (rank < more))
