"""Configs of encoders: the specs they become, and the ones that are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.errors import ModelError, UnknownArchitectureError
from inflight.models.decoders.families import decoder_spec
from inflight.models.encoders.families import encoder_architecture, encoder_head, encoder_spec
from inflight.models.head_config import SentenceFiles
from inflight.models.heads import DenseLayer

BERT: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MODERN = BERT | {"architectures": ["ModernBertModel"]}
ROBERTA = BERT | {"architectures": ["RobertaModel"]}


def test_encoder_configs_are_recognised() -> None:
    assert encoder_architecture(BERT) == "BertForSequenceClassification"
    assert (
        encoder_architecture({"architectures": ["Mine", "XLMRobertaForMaskedLM"]}) == "XLMRobertaForMaskedLM"
    )
    assert encoder_architecture({"model_type": "modernbert"}) == "ModernBertModel"
    assert encoder_architecture({"model_type": "llama"}) is None
    assert encoder_architecture({"architectures": ["BertForTokenClassification"]}) is None
    with pytest.raises(UnknownArchitectureError, match=r"Llama, .* and the encoders Bert, "):
        decoder_spec({"architectures": ["BertForTokenClassification"]})


def test_families_fill_in_their_defaults() -> None:
    bert, roberta, modern = encoder_spec(BERT), encoder_spec(ROBERTA), encoder_spec(MODERN)
    assert (bert.norm_eps, bert.num_segments, bert.max_position, bert.first_position) == (1e-12, 2, 64, 0)
    assert (roberta.num_positions, roberta.max_position, roberta.first_position) == (64, 62, 2)
    assert modern.windows == (None, 64, 64, None)
    assert [modern.ropes[rope or 0].theta for rope in modern.layer_ropes] == [160e3, 10e3, 10e3, 160e3]
    assert modern.num_positions == 0


def test_rope_parameters_by_layer_type_are_read() -> None:
    config = MODERN | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "local_attention": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        },
    }
    spec = encoder_spec(config)
    assert spec.windows == (10, None, 10, None)
    assert [spec.ropes[rope or 0].theta for rope in spec.layer_ropes] == [2e3, 5e4, 2e3, 5e4]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BERT | {"num_attention_heads": 5}, "it must be a divisor of hidden_size, 32"),
        (
            BERT | {"hidden_act": "mish"},
            "hidden_act in config.json is 'mish': it must be one of gelu, gelu_new",
        ),
        (BERT | {"position_embedding_type": "relative_key"}, "it must be null or 'absolute'"),
        (BERT | {"is_decoder": True}, "is_decoder"),
        (BERT | {"quantization_config": {}}, "has a quantization_config"),
        (BERT | {"num_hidden_layers": 10**9}, "it must be an integer from 1 to 4096"),
        (BERT | {"vocab_size": "many"}, "vocab_size in config.json is 'many'"),
        (ROBERTA | {"max_position_embeddings": 2}, "it must be above 2, the first position in use"),
        (MODERN | {"hidden_activation": "relu"}, "it must be one of gelu"),
        (MODERN | {"layer_types": ["full_attention"]}, "4 times full_attention or sliding_attention"),
        (MODERN | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_unsupported_fields_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        encoder_spec(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- heads ----


def test_encoder_without_a_head_is_rejected_with_the_reason() -> None:
    for files in (None, SentenceFiles()):
        with pytest.raises(ModelError, match="neither a classification head nor the pooling files"):
            encoder_head(MODERN, files, 32)


def test_pooling_files_take_precedence_over_a_classification_head() -> None:
    files = SentenceFiles(pooling=("cls", "max"), width=32, head=(DenseLayer("2_Dense/linear", 64, 8),))
    head = encoder_head(BERT, files, 32)
    assert (head.facts.task, head.facts.size, head.pooling) == ("embed", 8, ("cls", "max"))
    with pytest.raises(ModelError, match="pools 32 features, but hidden_size in"):
        encoder_head(BERT | {"hidden_size": 48}, files, 48)
    odd = SentenceFiles(pooling=("cls",), width=32, head=files.head)
    with pytest.raises(
        ModelError, match="2_Dense/linear takes 64 features, but the layer before it returns 32"
    ):
        encoder_head(BERT, odd, 32)


def test_unknown_pooling_of_a_classifier_is_rejected() -> None:
    config = MODERN | {"architectures": ["ModernBertForSequenceClassification"]}
    assert encoder_head(config | {"classifier_pooling": "mean"}, None, 32).pooling == ("mean",)
    with pytest.raises(ModelError, match="it must be 'cls' or 'mean'"):
        encoder_head(config | {"classifier_pooling": "max"}, None, 32)
