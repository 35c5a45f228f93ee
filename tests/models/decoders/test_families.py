"""Reading configs: what is rejected, and the error messages."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.errors import ModelError, UnknownArchitectureError
from inflight.layers.rotary import LinearScaling, LongScaling, Rope, Scaling, YarnScaling
from inflight.models.decoders.families import FAMILIES, decoder_spec
from inflight.models.decoders.spec import DecoderSpec
from tests.support.specs import attentions

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
QWEN2 = SMALL | {"architectures": ["Qwen2ForCausalLM"]}
PHI3 = SMALL | {"architectures": ["Phi3ForCausalLM"]}
GEMMA3 = SMALL | {"architectures": ["Gemma3ForCausalLM"]}


def test_error_for_an_unknown_architecture_lists_the_families() -> None:
    with pytest.raises(UnknownArchitectureError, match="FooForCausalLM") as caught:
        decoder_spec(SMALL | {"architectures": ["FooForCausalLM"]})
    families = str(caught.value).partition("families are ")[2].partition(" and the encoders ")[0].split(", ")
    assert len(families) == 21
    assert all(name.startswith(tuple(families)) for name in FAMILIES)


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    nameless = {key: value for key, value in SMALL.items() if key != "architectures"}
    assert attentions(decoder_spec(nameless | {"model_type": "qwen2"}))[0].qkv_bias
    with pytest.raises(UnknownArchitectureError, match="model_type gpt9"):
        decoder_spec(nameless | {"model_type": "gpt9"})
    with pytest.raises(UnknownArchitectureError):
        decoder_spec({})


@pytest.mark.parametrize(
    "name", [key for key in SMALL if key not in ("architectures", "num_key_value_heads")]
)
def test_missing_field_is_named(name: str) -> None:
    for config in ({k: v for k, v in SMALL.items() if k != name}, SMALL | {name: None}):
        with pytest.raises(ModelError, match=f"no '{name}'"):
            decoder_spec(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size in config.json is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* from 1 to 4096"),
        ({"num_key_value_heads": 3}, "num_key_value_heads .* divisor of num_attention_heads, 4"),
        ({"hidden_size": 66}, "divisor of hidden_size, 66"),
        ({"head_dim": 15}, "15 rotary features"),
        ({"hidden_act": "relu"}, "hidden_act .* silu"),
        ({"rms_norm_eps": 0}, "rms_norm_eps .* above 0"),
        ({"attention_bias": "yes"}, "attention_bias .* true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings .* true or false"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type .* llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of config.json has no 'factor'"),
        ({"rope_scaling": "linear"}, "rope_scaling .* an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor .* above 0"),
        ({"rope_theta": 1.0}, "rope_theta .* above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .* 1 for this architecture"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor .* above low_freq_factor",
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "no 'full_attention'"),
    ],
)
def test_contradictions_and_wrong_values_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        decoder_spec(SMALL | change)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (QWEN2 | {"layer_types": ["full_attention"]}, "lists 1 layers, num_hidden_layers is 4"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "missing or disabled"),
        (QWEN2 | {"layer_types": "full_attention"}, "a list of strings"),
        (
            GEMMA3 | {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is missing",
        ),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping .* null"),
        (SMALL | {"architectures": ["Gemma3ForConditionalGeneration"]}, "no 'text_config'"),
        (
            PHI3
            | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "long_factor .* 8 positive numbers",
        ),
    ],
)
def test_family_specific_contradictions_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        decoder_spec(config)


def test_windows() -> None:
    def windows(architecture: str, **change: Any) -> tuple[int | None, ...]:
        spec = decoder_spec(SMALL | {"architectures": [architecture], "sliding_window": 8} | change)
        return tuple(layer.window for layer in attentions(spec))

    assert windows("LlamaForCausalLM") == (None,) * 4
    assert windows("MistralForCausalLM") == (8,) * 4
    assert windows("MistralForCausalLM", sliding_window=None) == (None,) * 4
    assert windows("Qwen2ForCausalLM") == (None,) * 4
    late = {"use_sliding_window": True, "max_window_layers": 3}
    assert windows("Qwen3ForCausalLM", **late) == (None, None, None, 8)
    assert windows("Gemma3ForCausalLM", sliding_window_pattern=2) == (8, None, 8, None)
    assert windows("Gemma3ForCausalLM", num_hidden_layers=7) == (8, 8, 8, 8, 8, None, 8)


def test_gemma_configs_may_omit_transformers_defaults() -> None:
    """Multimodal checkpoints on the hub contain only these fields of their text model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = decoder_spec({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    heads = attentions(spec)[0]
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.tied_embeddings
    assert [layer.window for layer in attentions(spec)[:7]] == [1024] * 5 + [None, 1024]
    assert attentions(spec)[5].rope == Rope(1e6, 256, LinearScaling(8.0))
    assert attentions(spec)[0].rope == Rope(1e4, 256)


def scaling_of(spec: DecoderSpec) -> Scaling | None:
    rope = attentions(spec)[0].rope
    assert rope is not None
    return rope.scaling


def test_context_length_follows_the_scaling() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    spec = decoder_spec(SMALL | {"rope_scaling": yarn})
    assert isinstance(scaling_of(spec), YarnScaling)
    assert (spec.max_position, spec.default_context) == (4096, 4096)
    spec = decoder_spec(SMALL | {"rope_scaling": yarn, "max_position_embeddings": 4096})
    assert (spec.max_position, spec.default_context) == (4096, 4096)
    spec = decoder_spec(SMALL | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (spec.max_position, spec.default_context) == (1024, 1024)
    long = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spec = decoder_spec(PHI3 | {"rope_scaling": long, "original_max_position_embeddings": 256})
    assert isinstance(scaling_of(spec), LongScaling)
    assert (spec.max_position, spec.default_context) == (1024, 256)
