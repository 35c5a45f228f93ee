"""Checkpoints load with the `quantization_config` that others publish, which is often silent about plain modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.checkpoint.fields import Fields
from inflight.errors import ModelError, WeightsError
from inflight.layers.formats.weight_format import PlainFormat
from inflight.models.decoders.families import decoder_spec
from inflight.models.quantization import read_quantization
from tests.models.running import load, logprobs, prompt
from tests.models.test_quantization import keeping, split_experts
from tests.support.checkpoints import FAMILIES, make_model, write_checkpoint
from tests.support.quantized import Writer, Written, awq, block_fp8, compressed, gptq, rewrite, tensor_fp8

DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QWEN3_2507_FP8 = DEEPSEEK_V3 | {
    "modules_to_not_convert": [
        "lm_head",
        *(
            f"model.layers.{layer}.{module}"
            for layer in range(48)
            for module in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        ),
    ]
}
AUTO_FP8 = {"activation_scheme": "static", "quant_method": "fp8"}
DEVSTRAL = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
QWEN_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
QWEN_GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
AUTO_ROUND = {
    "autoround_version": "0.5.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {
        f"model.layers.{layer}.mlp.gate": {"bits": 16, "data_type": "float"} for layer in range(48)
    },
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
INT4: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
KIMI_K2_THINKING = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": INT4 | {"observer": "minmax", "observer_kwargs": {}},
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
FP8_DYNAMIC: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.10.3.dev47+ge463fe6",
}
GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def silent(config: dict[str, Any]) -> dict[str, Any]:
    """The same without its list of plain modules."""
    lists = ("modules_to_not_convert", "ignored_layers", "ignore", "extra_config")
    return {name: value for name, value in config.items() if name not in lists}


def devstral(weight: torch.Tensor) -> Written:
    """A scale of the whole matrix as transformers names it."""
    tensors, expected = tensor_fp8(weight)
    renamed = {"weight_scale_inv": tensors["weight_scale"], "activation_scale": tensors["input_scale"]}
    return {"weight": tensors["weight"]} | renamed, expected


channels = compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
groups = compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
# The name of a published config -> (the config, the modules that are quantized, the writer of their tensors)
PUBLISHED: dict[str, tuple[dict[str, Any], str, Writer]] = {
    "deepseek-v3, qwen3-fp8": (DEEPSEEK_V3, "_proj", block_fp8(128, 128)),
    "qwen3-2507-fp8": (QWEN3_2507_FP8, "_proj", block_fp8(128, 128)),
    "autofp8": (AUTO_FP8 | {"ignored_layers": ["lm_head"]}, "_proj", tensor_fp8),
    "devstral": (DEVSTRAL, "_proj", devstral),
    "qwen-awq": (QWEN_AWQ, "_proj", awq(128)),
    "qwen-gptq": (QWEN_GPTQ, "_proj", gptq(128)),
    "auto-round": (AUTO_ROUND, "_proj", gptq(128)),
    "fp8-dynamic": (FP8_DYNAMIC, "_proj", channels),
    "kimi-k2-thinking": (KIMI_K2_THINKING, ".experts.", groups),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a dense layer, and with sizes that are multiples of all groups and blocks."""
    folder = tmp_path_factory.mktemp("moe")
    return split_experts(folder, hidden_size=128, intermediate_size=128, moe_intermediate_size=128)


def check_loads(folder: Path) -> None:
    expected = logprobs(load(folder / "plain"), prompt())
    torch.testing.assert_close(logprobs(load(folder), prompt()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logprobs(keeping(folder), prompt()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_silent", [False, True], ids=["", "silent"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_loads(name: str, is_silent: bool, original: Path, tmp_path: Path) -> None:
    config, modules, write = PUBLISHED[name]
    config = silent(config) if is_silent else config
    check_loads(rewrite(original, tmp_path / "quantized", {modules: write}, config))


@pytest.mark.parametrize("config", [GPT_OSS, silent(GPT_OSS)], ids=["", "silent"])
def test_only_experts_are_mxfp4(config: dict[str, Any]) -> None:
    spec = decoder_spec(FAMILIES["gpt-oss"]().to_dict() | {"quantization_config": config})
    for module in ("layers.0.self_attn.q_proj", "layers.0.mlp.router", "layers.0.mlp.experts.gate_up_proj"):
        assert isinstance(spec.format_of(module), PlainFormat) == ("experts" not in module)
    assert isinstance(spec.head_format, PlainFormat)


def test_lm_head_may_be_fp8_if_it_has_a_scale(tmp_path: Path) -> None:
    """transformers quantizes the head if the list of exceptions is not empty, but does not name it."""
    original = write_checkpoint(tmp_path / "original", "llama")
    config = DEEPSEEK_V3 | {"modules_to_not_convert": ["mlp.gate"]}
    writers = {name: block_fp8(128, 128) for name in ("_proj", "lm_head")}
    folder = rewrite(original, tmp_path / "quantized", writers, config)
    assert "lm_head.weight_scale_inv" in load_file(folder / "model.safetensors")
    check_loads(folder)


def test_fp8_weight_without_a_scale_is_an_error(original: Path, tmp_path: Path) -> None:
    folder = rewrite(original, tmp_path / "quantized", {"_proj": block_fp8(128, 128)}, DEEPSEEK_V3)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lack model\.layers\.0\.self_attn\.o_proj\.weight_scale_inv"):
        load(folder)


def test_plain_weight_with_a_scale_is_an_error(original: Path, tmp_path: Path) -> None:
    folder = rewrite(original, tmp_path / "quantized", {"_proj": block_fp8(128, 128)}, DEEPSEEK_V3)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"o_proj\.weight .* is stored as BF16: it must be F8_E4M3"):
        load(folder)


@pytest.mark.parametrize("expert", [0, 3])
@pytest.mark.parametrize("names", [True, False], ids=["named", "silent"])
def test_one_expert_of_a_layer_may_be_plain(expert: int, names: bool, original: Path, tmp_path: Path) -> None:
    module = f"model.layers.0.mlp.experts.{expert}.down_proj"

    def as_it_is(weight: torch.Tensor) -> Written:
        return {"weight": weight}, weight

    ignored = {"ignore": ["lm_head", "re:.*mlp.gate$", *([module] if names else [])]}
    writers = {module: as_it_is, "_proj": channels}
    folder = rewrite(original, tmp_path / "quantized", writers, FP8_DYNAMIC | ignored)
    stored = load_file(folder / "model.safetensors")
    assert f"{module}.weight_scale" not in stored
    assert f"model.layers.0.mlp.experts.{expert + 1}.down_proj.weight_scale" in stored
    check_loads(folder)


SOME = DEEPSEEK_V3 | {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "down_proj"]}


@pytest.mark.parametrize("config", [DEEPSEEK_V3, SOME, AUTO_FP8], ids=["silent", "some", "autofp8"])
def test_fp8_modules_are_those_of_transformers(config: dict[str, Any]) -> None:
    """Without the files' tensors, as for plans and dummy weights, the same layers are quantized."""
    from transformers.integrations.finegrained_fp8 import FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    theirs = make_model("qwen3", tie_word_embeddings=False)
    own = {name: value for name, value in config.items() if name not in ("quant_method", "fmt")}
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**own), pre_quantized=True)
    quantizer._process_model_before_weight_loading(theirs)
    expected = {name for name, module in theirs.named_modules() if isinstance(module, FP8Linear)}
    assert "model.layers.1.self_attn.o_proj" in expected
    rules = read_quantization(Fields({"quantization_config": config}))
    linears = [name for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)]
    assert {name for name in linears if not isinstance(rules.format_of(name), PlainFormat)} == expected


def test_other_settings_of_auto_round_are_refused_by_name() -> None:
    config = AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}}
    with pytest.raises(
        ModelError, match=r"extra_config .* has other settings for 'model\.layers\.0\.mlp\.down"
    ):
        decoder_spec(FAMILIES["llama"]().to_dict() | {"quantization_config": config})
