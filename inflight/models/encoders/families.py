"""The encoder families: how a Hugging Face `config.json` becomes an `EncoderSpec`, and which head follows.

A family is an entry of `ENCODERS`; this file is the only one that knows them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.checkpoint.fields import Fields
from inflight.errors import ModelError
from inflight.layers.kernels import ACTIVATIONS, GATES
from inflight.models.encoders.spec import EncoderNames, EncoderSpec
from inflight.models.head_config import SentenceFiles, classifier_facts, embedding_facts, read_labels
from inflight.models.heads import DenseLayer, HeadLayer, NormLayer, head_size
from inflight.models.rope_config import read_rope
from inflight.scoring import PoolingFacts

FULL, SLIDING = "full_attention", "sliding_attention"
CLASSIFIER = "ForSequenceClassification"

# As configs name them.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# (fields of the config, hidden size, number of labels) -> the layers of a head
ReadHead = Callable[[Fields, int, int], tuple[HeadLayer, ...]]

_BERT_LAYER = {
    "attention.self.query": "qkv.q",
    "attention.self.key": "qkv.k",
    "attention.self.value": "qkv.v",
    "attention.output.dense": "output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "mlp_norm",
}
_DISTILBERT_LAYER = {
    "attention.q_lin": "qkv.q",
    "attention.k_lin": "qkv.k",
    "attention.v_lin": "qkv.v",
    "attention.out_lin": "output",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "up",
    "ffn.lin2": "down",
    "output_layer_norm": "mlp_norm",
}
_MODERNBERT_LAYER = {
    "attn_norm": "attention_norm",
    "attn.Wqkv": "qkv",
    "attn.Wo": "output",
    "mlp_norm": "mlp_norm",
    "mlp.Wi": "up",
    "mlp.Wo": "down",
}


def _dense_head(first: str, last: str, activation: str) -> ReadHead:
    """Return a head of two dense layers, named as in the checkpoint."""

    def read(fields: Fields, hidden: int, num_labels: int) -> tuple[HeadLayer, ...]:  # noqa: ARG001
        return DenseLayer(first, hidden, hidden, activation=activation), DenseLayer(last, hidden, num_labels)

    return read


def _modernbert_head(fields: Fields, hidden: int, num_labels: int) -> tuple[HeadLayer, ...]:
    activation = _activation(fields, "classifier_activation", ACTIVATIONS)
    return (
        DenseLayer("head.dense", hidden, hidden, fields.boolean("classifier_bias", False), activation),
        NormLayer("head.norm", hidden, fields.number("norm_eps"), fields.boolean("norm_bias", False)),
        DenseLayer("classifier", hidden, num_labels),
    )


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The properties of a family."""

    names: EncoderNames
    head: ReadHead  # of classification
    model_type: str  # for configs that name no architecture
    # Fields that configs may omit because transformers has a default.
    defaults: Mapping[str, Any]
    # Other names of fields: the usual one -> the family's.
    renamed: Mapping[str, str] = field(default_factory=dict)
    after_padding: bool = False  # positions start after the padding token's id
    modern: bool = False  # rotary positions, norms first, gated MLPs, windows
    # Fields that would change the computation, with the values that are supported.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_BERT_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0}
_BERT_FIXED: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
}
_ROBERTA_NAMES = EncoderNames(
    _BERT_LAYER,
    "encoder.layer",
    ("roberta.", ""),
    heads=(r"^classifier\.", r"^lm_head\."),
    ignored=(r"embeddings\.position_ids$", r"^(roberta\.)?pooler\."),
)
_ROBERTA: dict[str, Any] = {
    "head": _dense_head("classifier.dense", "classifier.out_proj", "tanh"),
    "defaults": _BERT_DEFAULTS | {"pad_token_id": 1},
    "after_padding": True,
    "fixed": _BERT_FIXED,
}

ENCODERS: Mapping[str, EncoderFamily] = {
    "Bert": EncoderFamily(
        EncoderNames(
            _BERT_LAYER,
            "encoder.layer",
            ("bert.", ""),
            heads=(r"^(bert\.)?pooler\.", r"^classifier\.", r"^cls\."),
        ),
        _dense_head("bert.pooler.dense", "classifier", "tanh"),
        "bert",
        _BERT_DEFAULTS,
        fixed=_BERT_FIXED,
    ),
    "Roberta": EncoderFamily(_ROBERTA_NAMES, model_type="roberta", **_ROBERTA),
    "XLMRoberta": EncoderFamily(_ROBERTA_NAMES, model_type="xlm-roberta", **_ROBERTA),
    "DistilBert": EncoderFamily(
        EncoderNames(
            _DISTILBERT_LAYER,
            "transformer.layer",
            ("distilbert.", ""),
            heads=(r"^(pre_)?classifier\.", r"^vocab_(transform|layer_norm|projector)\."),
        ),
        _dense_head("pre_classifier", "classifier", "relu"),
        "distilbert",
        {"activation": "gelu", "type_vocab_size": 0, "layer_norm_eps": 1e-12},
        renamed={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
    ),
    "ModernBert": EncoderFamily(
        EncoderNames(
            _MODERNBERT_LAYER,
            "layers",
            ("model.", ""),
            tokens="embeddings.tok_embeddings",
            embedding_norm="embeddings.norm",
            final_norm="final_norm",
            heads=(r"^head\.", r"^classifier\.", r"^decoder\."),
        ),
        _modernbert_head,
        "modernbert",
        {
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
            "classifier_activation": "gelu",
            "classifier_pooling": "cls",
        },
        renamed={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
        modern=True,
        fixed={"rope_scaling": (None,)},
    ),
}
# The suffixes of a family's models in transformers; all but the last are loaded as the encoder alone.
_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)
ENCODER_ARCHITECTURES = {family + suffix: family for family in ENCODERS for suffix in _SUFFIXES}


def encoder_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the first architecture in the config that is an encoder, or None."""
    named = config.get("architectures") or []
    names = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    if not names:
        types = {family.model_type: f"{name}Model" for name, family in ENCODERS.items()}
        return types.get(str(config.get("model_type")))
    return next((name for name in names if name in ENCODER_ARCHITECTURES), None)


def encoder_spec(config: Mapping[str, Any]) -> EncoderSpec:
    """Return the encoder that a `config.json` describes."""
    architecture, family, fields = _family(config)
    if "quantization_config" in fields:
        raise ModelError(
            f"{fields.where} has a quantization_config: encoders are served only from bf16, fp16 and fp32 checkpoints"
        )
    fields.check_supported(family.fixed)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
    num_layers, num_positions = fields.integer("num_hidden_layers"), fields.integer("max_position_embeddings")
    first_position = fields.integer("pad_token_id", least=0) + 1 if family.after_padding else 0
    if num_positions <= first_position:
        raise fields.error("max_position_embeddings", f"above {first_position}, the first position in use")
    layer_types = _layer_types(fields, num_layers) if family.modern else [FULL] * num_layers
    kinds = sorted(set(layer_types)) if family.modern else []
    ropes = tuple(read_rope(fields, kind, hidden_size // num_heads, False) for kind in kinds)
    window = fields.integer("local_attention") // 2 if SLIDING in layer_types else None
    return EncoderSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=fields.integer("intermediate_size"),
        num_positions=0 if family.modern else num_positions,
        first_position=first_position,
        num_segments=0 if family.modern else fields.integer("type_vocab_size", least=0),
        max_position=num_positions - first_position,
        windows=tuple(window if kind == SLIDING else None for kind in layer_types),
        ropes=ropes,
        layer_ropes=tuple(kinds.index(kind) if kinds else None for kind in layer_types),
        norm_eps=fields.number("layer_norm_eps"),
        norm_first=family.modern,
        norm_bias=fields.boolean("norm_bias", False) if family.modern else True,
        attention_bias=fields.boolean("attention_bias", False) if family.modern else True,
        mlp_bias=fields.boolean("mlp_bias", False) if family.modern else True,
        gated=family.modern,
        activation=_activation(fields, "hidden_act", GATES if family.modern else ACTIVATIONS),
        names=family.names,
    )


@dataclass(frozen=True, slots=True)
class EncoderHead:
    """The part that follows an encoder: how its hidden states are pooled, and the layers after that."""

    pooling: tuple[str, ...]
    layers: tuple[HeadLayer, ...]
    facts: PoolingFacts
    unused: tuple[str, ...]  # patterns of the tensors of the checkpoint's other heads


def encoder_head(config: Mapping[str, Any], files: SentenceFiles | None, hidden_size: int) -> EncoderHead:
    """Return the head that the checkpoint's files describe; it is never guessed."""
    architecture, family, fields = _family(config)
    if files is not None and files.pooling:
        if files.width != hidden_size:
            raise ModelError(
                f"modules.json pools {files.width} features, but hidden_size in config.json is {hidden_size}"
            )
        size = head_size(hidden_size * len(files.pooling), files.head)
        facts = embedding_facts(files, config, size, splittable=False)
        return EncoderHead(files.pooling, files.head, facts, family.names.heads)
    if not architecture.endswith(CLASSIFIER):
        raise ModelError(
            f"{architecture} returns a vector per token, and its folder does not say how a text gets one: it has "
            "neither a classification head nor the pooling files of sentence-transformers (modules.json)"
        )
    labels = read_labels(config)
    pooling = fields.string("classifier_pooling") if family.modern else "cls"
    if pooling not in ("cls", "mean"):
        raise fields.error("classifier_pooling", "'cls' or 'mean'")
    layers = family.head(fields, hidden_size, len(labels))
    return EncoderHead((pooling,), layers, classifier_facts(config, files, splittable=False), ())


def _family(config: Mapping[str, Any]) -> tuple[str, EncoderFamily, Fields]:
    """Return (architecture, its family, the config with the usual field names and the family's defaults)."""
    architecture = encoder_architecture(config)
    if architecture is None:
        raise ModelError(f"config.json names no supported encoder: {', '.join(ENCODER_ARCHITECTURES)}")
    family = ENCODERS[ENCODER_ARCHITECTURES[architecture]]
    values = {**family.defaults, **{name: value for name, value in config.items() if value is not None}}
    values |= {usual: values[own] for usual, own in family.renamed.items() if own in values}
    if family.modern:
        values["rope_theta"], values["rope_local_base_freq"] = (
            values["global_rope_theta"],
            values["local_rope_theta"],
        )
    return architecture, family, Fields(values)


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    if "layer_types" not in fields:
        every = fields.integer("global_attn_every_n_layers")
        return [SLIDING if index % every else FULL for index in range(num_layers)]
    kinds = fields.strings("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise fields.error("layer_types", f"{num_layers} times {FULL} or {SLIDING}")
    return kinds


def _activation(fields: Fields, name: str, allowed: tuple[str, ...]) -> str:
    activation = _ACTIVATIONS.get(fields.string(name), "")
    if activation not in allowed:
        known = [theirs for theirs, ours in _ACTIVATIONS.items() if ours in allowed]
        raise fields.error(name, f"one of {', '.join(known)}")
    return activation
