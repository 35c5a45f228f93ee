"""Configs of models whose layers differ: windows, heads, rotation, and gated delta nets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.errors import ConfigError, ModelError
from inflight.layers.rotary import Rope, YarnScaling
from inflight.models.decoders.attention import AttentionSpec
from inflight.models.decoders.delta_net import DeltaNet, DeltaNetSpec
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.spec import check_tensor_parallel, shard_of
from tests.models.running import load, logprobs, prompt, transformers_logprobs
from tests.support.checkpoints import FAMILIES, make_model, randomise, tolerance, write_checkpoint
from tests.support.specs import attentions


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = FAMILIES[family]().to_dict()
    return config | changes


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gemma4",
            {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 32},
            "vocab_size_per_layer_input .* is 32: it must be vocab_size, 320",
        ),
        (
            "gemma4",
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers .* is 3: .* a layer with full_attention",
        ),
        (
            "gemma4",
            {"num_kv_shared_layers": 4},
            "num_kv_shared_layers .* is 4: .* less than num_hidden_layers, 4",
        ),
        ("gemma4-moe", {"top_k_experts": 7}, "top_k_experts .* at most the number of experts, 6"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention .* is 'all'"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config .* each layer with full"),
        (
            "gemma4",
            {"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 16}}},
            "per_layer_config .* the same object",
        ),
        (
            "gemma4",
            {"per_layer_config": {"1": {"hidden_size": 8}, "3": {"hidden_size": 8}}},
            "per_layer_config .* head_dim and num_key_value_heads",
        ),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping .* above 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers .* a list of 3 numbers"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit .* above 0"),
        ("gpt-oss", {"layer_types": ["linear_attention"] * 3}, "may contain full_attention and sliding"),
        ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}, "may contain full_attention and linear"),
        ("qwen3.5", {"linear_num_value_heads": 6}, "linear_num_value_heads .* a multiple of .*, 4"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim .* from 2"),
        ("qwen3.5", {"linear_key_head_dim": 1 << 23}, "values per state: at most"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate .* is False"),
        ("qwen3.5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act .* 'silu'"),
    ],
)
def test_unsupported_switches_are_rejected_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as rejected:
        decoder_spec(config_of(family, **changes))
    assert "\n" not in str(rejected.value)


def test_windows_of_families_that_alternate() -> None:
    def windows(family: str, **changes: Any) -> list[int | None]:
        config = config_of(family, num_hidden_layers=6, sliding_window=8, **changes)
        del config["layer_types"]
        return [layer.window for layer in attentions(decoder_spec(config))]

    assert windows("gemma2") == [8, None] * 3
    assert windows("gpt-oss") == [8, None] * 3
    assert windows("olmo3") == [8, 8, 8, None, 8, 8]
    assert windows("smollm3", no_rope_layers=None) == [None] * 6
    switched = windows("smollm3", no_rope_layers=None, use_sliding_window=True)
    assert switched == [None, 8] * 3  # no_rope_layer_interval is 2 here
    assert windows("gemma4", per_layer_config=None) == [8] * 5 + [None]


def test_layers_without_rotation() -> None:
    layers = attentions(decoder_spec(config_of("smollm3", no_rope_layers=[1, 0, 1])))
    assert [layer.rope is None for layer in layers] == [False, True, False]
    assert decoder_spec(config_of("smollm3", no_rope_layers=[0, 0, 0])).default_context == 512


def test_heads_of_gemma4_in_the_older_layout() -> None:
    config = config_of("gemma4")
    new = decoder_spec(config)
    del config["per_layer_config"]
    old = decoder_spec(config | {"global_head_dim": 32, "num_global_key_value_heads": 1})
    assert old.mixers == new.mixers
    assert [(layer.num_kv_heads, layer.head_dim) for layer in attentions(new)] == [(2, 16), (1, 32)] * 2
    assert [layer.values_are_keys for layer in attentions(new)] == [False, True] * 2


def test_scaling_of_olmo3_applies_only_without_a_window() -> None:
    """Checkpoints on the hub have one rope_scaling for both kinds of layers."""
    config = config_of("olmo3")
    del config["rope_parameters"]
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    layers = attentions(decoder_spec(config | {"rope_theta": 500_000.0, "rope_scaling": scaling}))
    assert layers[0].rope == Rope(500_000.0, 16)
    assert layers[3].rope is not None
    assert isinstance(layers[3].rope.scaling, YarnScaling)


def test_config_of_gpt_oss_as_released() -> None:
    """Fields as in the checkpoints on the hub, which name their scaling in the older layout."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "max_position_embeddings": 131_072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
    }
    spec = decoder_spec(config)
    layers = attentions(spec)
    assert [layer.window for layer in layers[:4]] == [128, None, 128, None]
    assert all(layer.has_sinks and layer.qkv_bias and layer.output_bias for layer in layers)
    rope = layers[0].rope
    assert rope is not None
    assert isinstance(rope.scaling, YarnScaling)
    assert not rope.scaling.truncate
    assert (spec.max_position, spec.default_context) == (131_072, 131_072)


def test_delta_nets_take_the_place_of_attention() -> None:
    config = config_of("qwen3.5", num_hidden_layers=8)
    del config["layer_types"]
    spec = decoder_spec(config)
    kinds = [DeltaNetSpec, DeltaNetSpec, DeltaNetSpec, AttentionSpec]
    assert [type(mixer) for mixer in spec.mixers] == kinds * 2
    assert len(attentions(spec)) == 2
    assert all(layer.has_gate for layer in attentions(spec))


@pytest.mark.parametrize("vision", [False, True])
def test_text_model_of_a_qwen3_5_checkpoint_is_loaded(vision: bool, tmp_path: Path) -> None:
    """Weights of the vision tower, and of the modules that predict further tokens, are skipped."""
    import transformers

    if vision:
        text = FAMILIES["qwen3.5"]().to_dict()
        small = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        config = transformers.Qwen3_5Config(text_config=text, vision_config=small)
        model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
        randomise(model)
    else:
        model = make_model("qwen3.5")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, file)
    ours = logprobs(load(tmp_path), prompt())
    torch.testing.assert_close(
        ours, transformers_logprobs(model, prompt()), rtol=0, atol=tolerance("qwen3.5")
    )


def test_text_model_of_a_gemma4_checkpoint_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gemma4")
    expected = logprobs(load(folder), prompt())
    path, file = folder / "config.json", folder / "model.safetensors"
    text = json.loads(path.read_text())
    vision = {"hidden_size": 16}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
    }
    path.write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model."): tensor.clone()
        for name, tensor in load_file(file).items()
    }
    save_file(tensors | {"model.vision_tower.patch.weight": torch.zeros(2, 2)}, file)
    assert torch.equal(logprobs(load(folder), prompt()), expected)


def test_delta_nets_are_split_by_key_heads() -> None:
    spec = decoder_spec(config_of("qwen3.5"))
    shape = shard_of(spec, 1, 2).spec.mixers[0]
    assert isinstance(shape, DeltaNetSpec)
    assert (shape.shape.num_key_heads, shape.shape.num_value_heads) == (2, 4)
    net = spec.mixers[0]
    assert isinstance(net, DeltaNetSpec)
    uneven = DeltaNetSpec(replace(net.shape, num_key_heads=1))
    with pytest.raises(ConfigError, match=r"size is 2: .* key heads of the model's delta nets, 1"):
        check_tensor_parallel(replace(spec, mixers=(uneven, *spec.mixers[1:])), 2)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_ranks_hold_their_heads_of_a_delta_net(family: str, tmp_path: Path) -> None:
    """The rows that two ranks load are those of the whole layer, head by head."""
    write_checkpoint(tmp_path, family)
    spec = decoder_spec(json.loads((tmp_path / "config.json").read_text()))
    whole = net_of(load(tmp_path))
    for rank in (0, 1):
        own = net_of(load(tmp_path, shard=shard_of(spec, rank, 2)))
        x = torch.eye(64)
        heads = [tensor.chunk(2, dim=1)[rank] for tensor in projected_parts(whole, x)]
        torch.testing.assert_close(torch.cat(heads, dim=1), own.projections(x), rtol=0, atol=0)
        shape = whole.layer.shape
        keys = shape.num_key_heads * shape.key_dim
        weights = torch.split(whole.layer.conv_weight, [keys, keys, shape.value_size])
        assert torch.equal(torch.cat([part.chunk(2)[rank] for part in weights]), own.layer.conv_weight)
        assert torch.equal(whole.layer.a_log.chunk(2)[rank], own.layer.a_log)
        assert torch.equal(whole.layer.dt_bias.chunk(2)[rank], own.layer.dt_bias)


def net_of(decoder: Any) -> DeltaNet:
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, DeltaNet)
    return mixer


def projected_parts(net: DeltaNet, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, z, b and a."""
    shape = net.layer.shape
    keys, values, heads = shape.num_key_heads * shape.key_dim, shape.value_size, shape.num_value_heads
    return torch.split(net.projections(x), [keys, keys, values, values, heads, heads], dim=1)
