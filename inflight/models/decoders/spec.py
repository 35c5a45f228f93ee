"""The description of a decoder as data, so that the decoder itself knows no model family by name; and of a rank's part.

Tensor parallel ranks of one pipeline stage have the same layers, but different attention heads, MLP features and parts
of the vocabulary. Pipeline stages have different layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from inflight.errors import ConfigError
from inflight.kv.layout import LayerKV
from inflight.layers.formats.schemes import Scheme, common_scheme
from inflight.layers.formats.weight_format import PLAIN_FORMAT, PlainFormat, WeightFormat
from inflight.layers.rotary import Rope
from inflight.models.quantization import UNQUANTIZED, Quantization
from inflight.models.tensors import StoredTensor

if TYPE_CHECKING:
    from inflight.models.decoders.predictor import Predictor
    from inflight.models.decoders.sublayers import LayerBuilder, Mixer, Mlp


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


IGNORED = (r"rotary_emb\.inv_freq$",)

# Targets of the experts' matrices: the ones stored together, and the others.
EXPERTS_GATE_UP = ("mlp.experts.gate", "mlp.experts.up", "mlp.experts.gate_up")
EXPERTS_DOWN = "mlp.experts.down"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How a checkpoint names its tensors.

    `layer` maps the modules inside a layer to targets in the decoder's: "attention.qkv.k" is the part "k" of the packed
    linear layer "qkv" of attention, "attention.qkv" all of it, and "in_norm" the norm of whatever the layer begins
    with. Modules whose target a layer does not have are skipped.

    `experts` are the layouts in which checkpoints hold routers and experts, and likewise map names to targets. A name
    with "{}" is that of a module, once for each expert; others are names of tensors that hold all experts.
    """

    layer: Mapping[str, str]
    experts: tuple[Mapping[str, str], ...] = ({},)
    prefixes: tuple[str, ...] = ("model.",)  # the first that the checkpoint has an embedding under
    layers: str = "layers"  # after the prefix: what the layers are in
    first_layer: int | None = 0  # the number of the first one; None: there is only one, without a number
    heads: tuple[str, ...] = ("lm_head.weight",)  # the output head, one for each prefix
    classifier: str = "score.weight"  # the head of a model that classifies
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm"  # less ".weight"
    ignored: tuple[str, ...] = IGNORED  # patterns of tensors that are not needed

    def layer_name(self, index: int) -> str:
        return self.layers if self.first_layer is None else f"{self.layers}.{self.first_layer + index}"


class MixerSpec(Protocol):
    """The part of a layer in which tokens learn of earlier ones: what it keeps of them, and how ranks share it."""

    @property
    def kv(self) -> LayerKV | None:
        """The keys and values that the layer keeps for each token; None: nothing."""

    @property
    def kv_source(self) -> int | None:
        """The earlier layer whose keys and values it reads; None: it reads its own, if any."""

    @property
    def state_size(self) -> int:
        """The number of values of a request's state; 0: it is not recurrent."""

    @property
    def rope(self) -> Rope | None:
        """The rotary embedding of its tokens; None: they are not rotated."""

    def with_quantized_kv(self, dtype: str) -> MixerSpec:
        """Return the same with what it keeps of tokens in "fp8" or "int8"."""

    def step_values(self, num_tokens: int, num_pieces: int) -> int:
        """Return the number of intermediate values of a step that are in memory at once. Recurrent layers on a GPU
        compute prompts in pieces."""

    def decode_values(self, num_processors: int) -> int:
        """Return the number of float32 values that a GPU keeps for each decode between two kernels."""

    @property
    def kept_values(self) -> int:
        """The number of values that a GPU keeps of a token while it may be a draft."""

    def check_split(self, size: int) -> None:
        """Raise ConfigError if it cannot be split across `size` ranks."""

    def shard(self, shard: Shard) -> MixerSpec:
        """Return the part that a rank computes."""

    def build(self, layer: LayerBuilder) -> Mixer:
        """Return a rank's part with empty weights. This spec is that of the whole mixer."""


class MlpSpec(Protocol):
    """The part of a layer that handles each token by itself."""

    def step_values(self, hidden: int) -> int:
        """Return the number of intermediate values of a token that are in memory at once."""

    def num_parts(self, expert_parallel: bool) -> int:
        """Return the largest number of ranks that it can be split across."""

    def build(self, layer: LayerBuilder) -> Mlp:
        """Return a rank's part with empty weights."""


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """Inputs of each layer: an embedding of the token for every layer, plus a projection of the usual one."""

    size: int  # features
    activation: str  # of the gates through which a layer reads them

    @property
    def embedding_scale(self) -> float:
        scale: float = self.size**0.5
        return scale


# By layer: the number of its keys and values in `MixerStep.caches`, and the block table that leads to them.
KVCaches = Mapping[int, tuple[int, int]]


class PredictorSpec(Protocol):
    """Further layers that guess tokens beyond the next (`predictor.py`, `eagle.py`, `draft_model.py`)."""

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:
        """Return its layers as a decoder. Their keys and values are behind those of the other."""

    def with_quantized_kv(self, dtype: str) -> PredictorSpec:
        """Return the same with keys and values in "fp8" or "int8"."""

    def build(self, decoder: DecoderSpec, layer: LayerBuilder, caches: KVCaches) -> Predictor:
        """Return a rank's part with empty weights. Its layers that keep keys and values are numbered behind those of
        the decoder."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with RMS norms and gated MLPs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mixers: tuple[MixerSpec | None, ...]  # of each layer; None: it is only an MLP
    mlps: tuple[MlpSpec | None, ...]  # of each layer; None: it is only a mixer
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
    logit_divisor: float = 1.0
    # Whether each layer multiplies the residual by a learned number at its end.
    has_layer_scales: bool = False
    layer_inputs: LayerInputsSpec | None = None
    # Whether tensor parallel ranks hold some of the experts, instead of some features of each.
    expert_parallel: bool = False
    quantization: Quantization = UNQUANTIZED
    predictor: PredictorSpec | None = None  # None: there is none, or it is not needed

    def format_of(self, module: str) -> WeightFormat:
        """Return the format of a module's weights; "{}" in its name stands for any expert."""
        return self.quantization.format_of(*self._names_of(module))

    def unquantized_experts(self, module: str) -> frozenset[int]:
        """Return the experts whose weights are plain whatever the format is."""
        return self.quantization.unquantized_experts(*self._names_of(module))

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
        return weights if not self.tied_embeddings or isinstance(weights, PlainFormat) else PLAIN_FORMAT

    def scheme(self, layer: int, *targets: str) -> Scheme | None:
        """Return the scheme for the weights packed into these targets, or None unless every source module is quantized
        compatibly."""
        modules = [
            f"{self.names.layer_name(layer)}.{module}"
            for names in (self.names.layer, *self.names.experts)
            for module, target_names in names.items()
            if f"{target_names}.".startswith(tuple(f"{target}." for target in targets))
        ]
        if any(map(self.unquantized_experts, modules)):
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
        return any(mixer is not None and mixer.state_size for mixer in self.mixers)

    @property
    def kv_layers(self) -> dict[int, MixerSpec]:
        """The mixers that keep keys and values, by the layer's index."""
        return {
            index: mixer
            for index, mixer in enumerate(self.mixers)
            if mixer is not None and mixer.kv is not None
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
        mixers = tuple(mixer and mixer.shard(self) for mixer in whole.mixers[layers])
        return replace(whole, mixers=mixers, mlps=whole.mlps[layers])

    @property
    def predictor(self) -> Shard | None:
        """This rank's part of the layer that predicts further tokens."""
        predictor = self.whole.predictor
        if predictor is None:
            return None
        whole = predictor.layer_of(self.whole)
        return replace(self, whole=whole, layers=range(whole.num_layers))

    def part(self, count: int) -> range:
        """Return this rank's share of `count` features."""
        return _part(count, self.rank, self.size)

    @property
    def vocab_sizes(self) -> list[int]:
        """The number of tokens of each rank."""
        return [len(_part(self.whole.vocab_size, rank, self.size)) for rank in range(self.size)]


def check_tensor_parallel(spec: DecoderSpec, size: int) -> None:
    """Raise if the model cannot be split across `size` ranks."""
    further = () if spec.predictor is None else spec.predictor.layer_of(spec).mixers
    for mixer in dict.fromkeys((*spec.mixers, *further)):
        if mixer is not None:
            mixer.check_split(size)
    parts = [mlp.num_parts(spec.expert_parallel) for mlp in spec.mlps if mlp is not None]
    inner = min(parts, default=size)
    if min(inner, spec.vocab_size) < size:
        parts_name = "experts" if spec.expert_parallel else "inner features"
        raise ConfigError(
            f"tensor_parallel_size is {size}: the model has {inner} {parts_name} and {spec.vocab_size} tokens, and "
            "every rank needs at least one of each"
        )


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
