"""Quantized checkpoints: every format loads to the weights it stands for, and what cannot be loaded is rejected."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.checkpoint.fields import Fields
from inflight.errors import ConfigError, ModelError, WeightsError
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.formats.packed import AwqFormat, GptqFormat
from inflight.layers.formats.schemes import GroupScheme
from inflight.layers.formats.weight_format import PlainFormat
from inflight.layers.torch_kernels import TorchKernels
from inflight.layers.triton_experts import TritonExperts
from inflight.layers.triton_kernels import TritonKernels, TritonLinear
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import META, meta_decoder, num_bytes
from inflight.models.decoders.spec import shard_of
from inflight.models.decoders.weights import load_decoder, placements
from inflight.models.quantization import read_quantization
from inflight.models.tensors import tensors_of
from tests.models.running import CPU, load, logprobs, prompt
from tests.support.checkpoints import FAMILIES, write_checkpoint
from tests.support.quantized import (
    Writer,
    act_order,
    awq,
    block_fp8,
    compressed,
    gptq,
    rewrite,
    tensor_fp8,
)


def groups(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def compressed_case(
    layout: str, inputs: dict[str, Any] | None = None, **arguments: Any
) -> tuple[Writer, Any]:
    return compressed(layout, **arguments), groups(layout, arguments, inputs)


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"], **more}


def gptq_case(bits: int = 4, group: int = 32, sym: bool = True, v2: bool = False, act: bool = False) -> Any:
    config = {"bits": bits, "group_size": group, "sym": sym, "desc_act": act, "quant_method": "gptq"}
    layout = {"checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False}
    return gptq(group, bits, sym, 2 if v2 else 1, not act), config | layout


FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
DYNAMIC: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 in blocks": (block_fp8(16, 32), fp8(activation_scheme="dynamic", weight_block_size=[16, 32])),
    "fp8 in large blocks": (block_fp8(128, 128), fp8(weight_block_size=[128, 128])),
    "fp8 in blocks, powers of two": (
        block_fp8(32, 32, exponents=True),
        fp8(weight_block_size=[32, 32], scale_fmt="ue8m0"),
    ),
    "fp8, one scale": (tensor_fp8, fp8(activation_scheme="static")),
    "compressed fp8, channels": compressed_case("float-quantized", DYNAMIC, strategy="channel", **FLOAT),
    "compressed fp8, one scale": compressed_case("naive-quantized", strategy="tensor", **FLOAT),
    "compressed fp8, blocks": compressed_case(
        "float-quantized", strategy="block", block_structure=[16, 32], **FLOAT
    ),
    "compressed int8": compressed_case(
        "int-quantized", strategy="channel", num_bits=8, type="int", symmetric=True
    ),
    "compressed int8, inputs too": compressed_case(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        strategy="channel",
        num_bits=8,
        type="int",
        symmetric=True,
    ),
    "compressed int4": compressed_case(
        "pack-quantized", strategy="group", group_size=32, symmetric=True, **INT4
    ),
    "compressed int4 with zeros": compressed_case(
        "pack-quantized", strategy="group", group_size=16, symmetric=False, **INT4
    ),
    "compressed int4, channels": compressed_case("pack-quantized", strategy="channel", **INT4),
    "compressed int8, packed": compressed_case(
        "pack-quantized", strategy="group", group_size=32, num_bits=8, type="int", symmetric=False
    ),
    "compressed int4, act-order": (
        act_order(16),
        groups("pack-quantized", {"strategy": "group", "group_size": 16, "actorder": "group", **INT4}),
    ),
    "awq": (
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "gptq": gptq_case(),
    "gptq with zeros": gptq_case(sym=False),
    "gptq v2 with zeros": gptq_case(sym=False, v2=True),
    "gptq, act-order": gptq_case(group=16, act=True),
    "gptq, channels": gptq_case(group=-1),
    "gptq, 8 bits": gptq_case(bits=8, sym=False),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def keeping(folder: Path) -> Decoder:
    """Load a decoder whose layers hold quantized weights."""
    kernels = TorchKernels(quantized=True)
    backend = ComposedAttention(kernels, TorchCpuAttention())
    return load_decoder(open_checkpoint(str(folder)), kernels, backend, torch.float32, CPU)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")


def on_gpu(folder: Path) -> Decoder:
    """Load a decoder whose layers are those of a GPU, in Triton's interpreter."""
    backend = ComposedAttention(TorchKernels(), TorchCpuAttention())
    kernels = TritonKernels(torch.float32, CPU)
    return load_decoder(open_checkpoint(str(folder)), kernels, backend, torch.float32, CPU)


@pytest.mark.parametrize("case", CASES)
def test_format_loads_as_the_weights_it_stands_for(case: str, original: Path, tmp_path: Path) -> None:
    write, config = CASES[case]
    folder = rewrite(original, tmp_path / "quantized", {"_proj": write}, config)
    plain = load(folder / "plain")
    expected = logprobs(plain, prompt())
    assert (expected - logprobs(load(original), prompt())).abs().max() > 1e-3, "nothing was quantized"
    torch.testing.assert_close(logprobs(load(folder), prompt()), expected, rtol=1e-4, atol=1e-4)
    kept = keeping(folder)
    torch.testing.assert_close(logprobs(kept, prompt()), expected, rtol=1e-4, atol=1e-4)
    smaller = num_bytes(kept.layers) < 0.5 * num_bytes(plain.layers)
    assert smaller == ("act-order" not in case)


@interpreted
@pytest.mark.parametrize(("case", "error"), [("gptq, 8 bits", 1e-4), ("compressed int8, inputs too", 0.05)])
def test_int8_is_held_and_multiplied_on_a_gpu(
    case: str, error: float, original: Path, tmp_path: Path
) -> None:
    write, config = CASES[case]
    folder = rewrite(original, tmp_path / "quantized", {"_proj": write}, config)
    decoder = on_gpu(folder)
    down = decoder.layers[0].mlp.down  # type: ignore[union-attr]
    assert isinstance(down, TritonLinear)
    assert down.weights.codes.dtype == torch.int8
    expected = logprobs(load(folder / "plain"), prompt())
    torch.testing.assert_close(logprobs(decoder, prompt()), expected, rtol=error, atol=error)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["compressed int4 with zeros", "gptq with zeros", "awq", "fp8 in blocks"])
def test_rank_holds_its_part_of_quantized_weights(case: str, rank: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "wide", "llama", intermediate_size=128)
    write, config = CASES[case]
    quantized = rewrite(folder, tmp_path / "quantized", {"_proj": write}, config)
    for path, kept in ((quantized, False), (quantized, True), (quantized / "plain", False)):
        kernels = TorchKernels(quantized=kept)
        checkpoint = open_checkpoint(str(path))
        shard = shard_of(decoder_spec(checkpoint.config), rank, 2)
        backend = ComposedAttention(kernels, TorchCpuAttention())
        decoder = load_decoder(checkpoint, kernels, backend, torch.float32, CPU, shard=shard)
        attention, mlp = decoder.layers[1].mixer, decoder.layers[1].mlp
        linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)  # type: ignore[union-attr]
        weights = [linear(torch.eye(linear.in_features)) for linear in linears]
        if path == quantized and not kept:
            first = weights
        for weight, other in zip(weights, first, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "case", "modules"),
    [
        ("llama", "compressed int4 with zeros", ("q_proj", "gate_proj")),
        ("llama", "gptq with zeros", ("q_proj", "gate_proj")),
        ("llama", "awq", ("q_proj", "gate_proj")),
        ("llama", "fp8 in blocks", ("q_proj", "gate_proj")),
        ("gpt-oss", "mxfp4", ("experts.gate_up_proj_",)),
        ("gpt-oss", "mxfp4 of whole experts", ("experts.gate_up_proj_", "experts.down_proj_")),
    ],
)
def test_ranks_together_read_quantized_rows_once(family: str, case: str, modules: tuple[str, ...]) -> None:
    quantization = CASES[case][1] if case in CASES else {"quant_method": "mxfp4"}
    config = FAMILIES[family](intermediate_size=256, hidden_size=256).to_dict()
    spec = decoder_spec(config | {"quantization_config": quantization})
    spec = replace(spec, expert_parallel="whole" in case)
    read: dict[str, int] = {}
    stored: dict[str, int] = {}
    for rank in (0, 1):
        decoder = meta_decoder(shard_of(spec, rank, 2), TorchKernels(device=META), torch.float32)
        for placement in placements(decoder):
            has_rows = not placement.name.endswith(("bias", "g_idx"))
            if has_rows and any(module in placement.name for module in modules):
                tensor = torch.empty(placement.shape, device=META)
                read[placement.name] = read.get(placement.name, 0) + tensor[placement.needed].numel()
                stored[placement.name] = tensor.numel()
    assert read == stored
    assert read


def test_rank_whose_columns_cut_a_group_is_rejected(original: Path, tmp_path: Path) -> None:
    write, config = CASES["compressed int4"]  # 96 inner features in groups of 32
    folder = rewrite(original, tmp_path / "quantized", {"_proj": write}, config)
    checkpoint = open_checkpoint(str(folder))
    kernels = TorchKernels()
    backend = ComposedAttention(kernels, TorchCpuAttention())
    shard = shard_of(decoder_spec(checkpoint.config), 0, 2)
    with pytest.raises(
        WeightsError,
        match=r"^model\.layers\.0\.mlp\.down_proj: columns 0 to 47 cannot be cut .* multiples of 32$",
    ):
        load_decoder(checkpoint, kernels, backend, torch.float32, CPU, shard=shard)


def test_modules_may_have_different_schemes(original: Path, tmp_path: Path) -> None:
    """Queries are plain, keys and values fp8, the MLP int4 but for one projection of one layer."""
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    channels = {"strategy": "channel", **FLOAT}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*self_attn.q_proj", "model.layers.1.mlp.up_proj"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": channels, "format": "float-quantized"},
            "group_1": {"targets": [r"re:.*mlp\."], "weights": int4, "format": "pack-quantized"},
        },
    }
    fp8_writer, int4_writer = (
        compressed("float-quantized", **channels),
        compressed("pack-quantized", **int4),
    )
    writers: dict[str, Writer] = {
        "q_proj": lambda weight: ({"weight": weight}, weight),
        "layers.1.mlp.up_proj": lambda weight: ({"weight": weight}, weight),
        "mlp": int4_writer,
        "self_attn": fp8_writer,
    }
    folder = rewrite(original, tmp_path / "quantized", writers, config)
    expected = logprobs(load(folder / "plain"), prompt())
    for decoder in (load(folder), keeping(folder)):
        torch.testing.assert_close(logprobs(decoder, prompt()), expected, rtol=1e-4, atol=1e-4)


def split_experts(tmp_path: Path, **overrides: Any) -> Path:
    """Write a checkpoint with a tensor for each expert, as quantized ones have them. Newer versions of transformers
    store all experts of a layer in one tensor."""
    folder = write_checkpoint(tmp_path / "original", "qwen3-moe", **{"moe_intermediate_size": 32} | overrides)
    tensors = load_file(folder / "model.safetensors")
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            base = name.rpartition(".")[0]
            for expert, matrix in enumerate(tensor):
                if "gate_up" in name:
                    gate, up = matrix.chunk(2)
                    split[f"{base}.{expert}.gate_proj.weight"] = gate.clone()
                    split[f"{base}.{expert}.up_proj.weight"] = up.clone()
                else:
                    split[f"{base}.{expert}.down_proj.weight"] = matrix.clone()
        else:
            split[name] = tensor
    save_file(split, folder / "model.safetensors")
    return folder


def test_quantized_experts_load(tmp_path: Path) -> None:
    config = fp8(weight_block_size=[16, 32])
    writers = {"_proj": block_fp8(16, 32)}
    quantized = rewrite(split_experts(tmp_path), tmp_path / "quantized", writers, config)
    expected = logprobs(load(quantized / "plain"), prompt())
    torch.testing.assert_close(logprobs(load(quantized), prompt()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logprobs(keeping(quantized), prompt()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logprobs(load(quantized, fast=True), prompt()), expected, rtol=1e-3, atol=1e-3)


@interpreted
@pytest.mark.parametrize("case", ["awq", "gptq", "compressed int4, channels", "compressed int8, packed"])
def test_integer_experts_are_held_and_multiplied_on_a_gpu(case: str, tmp_path: Path) -> None:
    write, config = CASES[case]
    quantized = rewrite(split_experts(tmp_path), tmp_path / "quantized", {"_proj": write}, config)
    decoder = on_gpu(quantized)
    experts = decoder.layers[0].mlp.experts  # type: ignore[union-attr]
    assert isinstance(experts, TritonExperts)
    assert experts.down.codes.dtype == (
        torch.int8 if "int8" in case else torch.int16
    )  # int16: four codes of 4 bits
    expected = logprobs(load(quantized / "plain"), prompt())
    torch.testing.assert_close(logprobs(decoder, prompt()), expected, rtol=1e-4, atol=1e-4)


def test_mxfp4_experts_of_gpt_oss_load(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = write_checkpoint(tmp_path / "plain", "gpt-oss", intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    quantized = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_columns, num_rows = tensors[name].shape
        generator = torch.Generator().manual_seed(num_rows)
        shape = num_experts, num_rows, num_columns // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    (tmp_path / "mxfp4").mkdir()
    (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(config))
    save_file(quantized, tmp_path / "mxfp4" / "model.safetensors")
    expected = logprobs(load(folder), prompt())
    for decoder in (load(tmp_path / "mxfp4"), keeping(tmp_path / "mxfp4")):
        torch.testing.assert_close(logprobs(decoder, prompt()), expected, rtol=1e-4, atol=1e-4)
    kernels = TorchKernels()
    backend = ComposedAttention(kernels, TorchCpuAttention())
    for rank, expert_parallel in itertools.product((0, 1), (False, True)):
        held = []
        for path in (folder, tmp_path / "mxfp4"):
            checkpoint = open_checkpoint(str(path))
            spec = replace(decoder_spec(checkpoint.config), expert_parallel=expert_parallel)
            shard = shard_of(spec, rank, 2)
            decoder = load_decoder(checkpoint, kernels, backend, torch.float32, CPU, shard=shard)
            held.append(list(tensors_of(decoder.layers)))
        assert all(torch.equal(plain, quantized) for plain, quantized in zip(*held, strict=True))
    edited(tmp_path / "mxfp4", "model.layers.1.mlp.experts.down_proj_scales", lambda t: t | 255)
    with pytest.raises(WeightsError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj of expert 0: scales"):
        load(tmp_path / "mxfp4")


def edited(folder: Path, name: str, change: Any) -> None:
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    value = change(tensors.pop(name))
    if value is not None:
        tensors[name] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "tensor", "change", "message"),
    [
        (
            "fp8 in blocks",
            "weight_scale_inv",
            lambda t: t[:-1],
            r"weight_scale_inv in .* has shape \[3, 2\]: config\.json requires \[4, 2\]",
        ),
        ("fp8 in blocks", "weight_scale_inv", lambda _: None, f"lack {Q}.weight_scale_inv"),
        ("fp8 in blocks", "weight_scale_inv", lambda t: t * torch.inf, "contains NaN or infinity"),
        (
            "fp8 in blocks",
            "weight",
            lambda t: t.float(),
            r"q_proj\.weight .* stored as F32: it must be F8_E4M3$",
        ),
        ("fp8 in blocks", "weight", lambda t: (t.float() * torch.nan).to(t.dtype), "weight contains NaN"),
        ("compressed int8", "weight_scale", lambda t: t.int(), "weight_scale .* stored as I32"),
        ("compressed int4", "weight_packed", lambda t: t[:, :-1], r"weight_packed .* shape \[64, 7\]"),
        ("awq", "qzeros", lambda t: t.T.contiguous(), r"qzeros .* has shape \[8, 2\].*requires \[2, 8\]"),
        ("gptq", "qzeros", lambda t: t + 1, f"^{Q}: qzeros are not all 8"),
        ("gptq", "g_idx", lambda t: t.flip(0), f"^{Q}: columns are not in the order of their groups"),
        ("gptq, act-order", "g_idx", lambda t: t + 9, f"^{Q}: a column's group is out of range"),
    ],
)
def test_wrong_tensor_is_rejected(
    case: str, tensor: str, change: Any, message: str, original: Path, tmp_path: Path
) -> None:
    write, config = CASES[case]
    folder = rewrite(original, tmp_path / "quantized", {"_proj": write}, config)
    edited(folder, f"{Q}.{tensor}", change)
    with pytest.raises(WeightsError, match=message) as rejected:
        load(folder)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method .* is 'bitsandbytes': it must be one of fp8, compressed",
        ),
        ({}, "no 'quant_method'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt .* is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .* a list of two integers"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits .* is 8: it must be 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version .* is 'gemv'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits .* is 3: it must be 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 12}, "group_size .* is 12"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            "checkpoint_format .* 'marlin': it must be gptq or gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"-:(a)\1": {}}},
            r"'\(a\).*1' .* has groupref, which is not supported",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:[": {}}},
            "is not a regular expression",
        ),
        (groups("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "4-bit float weights as nvfp4"),
        (
            groups("float-quantized", {"strategy": "channel", **FLOAT}, {"num_bits": 4, "type": "int"}),
            "quantizes inputs to 4-bit int",
        ),
        (
            groups("pack-quantized", {"strategy": "tensor_group", "group_size": 16, **INT4}),
            "strategy .* one of channel, group",
        ),
        (
            groups("dense", {"strategy": "channel", **FLOAT}) | {"sparsity_config": {"format": "sparse-24"}},
            "format in sparsity_config",
        ),
    ],
)
def test_unsupported_config_is_rejected_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as rejected:
        decoder_spec(FAMILIES["llama"]().to_dict() | {"quantization_config": config})
    assert "\n" not in str(rejected.value)


def test_size_that_a_format_cannot_store_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"60 outputs cannot be packed into int32: .* multiple of 8"):
        AwqFormat(4, 32, True).tensors(60, 64)


def test_excluded_modules_are_plain() -> None:
    def formats(config: dict[str, Any], *modules: str) -> list[bool]:
        quantization = read_quantization(Fields({"quantization_config": config}))
        return [not isinstance(quantization.format_of(module), PlainFormat) for module in modules]

    q, gate = "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.gate"
    assert formats(fp8(modules_to_not_convert=["lm_head", "mlp.gate"]), q, gate, "lm_head") == [
        True,
        False,
        False,
    ]
    assert formats(fp8(modules_to_not_convert=["model.layers.1"]), q, gate) == [True, True]
    assert formats({"quant_method": "fp8", "ignored_layers": [q]}, q, gate) == [False, True]
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert formats(mxfp4, q, "model.layers.3.mlp.experts.gate_up_proj") == [False, True]
    awq_config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": ["self_attn"],
    }
    assert formats(awq_config, q, gate, "lm_head") == [False, True, False]


def test_gptq_rules_change_and_skip_modules() -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
        "dynamic": {r"-:.*\.0\.": {}, r"+:.*down_proj": {"bits": 8, "group_size": 64, "desc_act": False}},
    }
    quantization = read_quantization(Fields({"quantization_config": config}))
    assert isinstance(quantization.format_of("model.layers.0.mlp.down_proj"), PlainFormat)
    assert isinstance(quantization.format_of("lm_head"), PlainFormat)
    down = quantization.format_of("model.layers.1.mlp.down_proj")
    assert isinstance(down, GptqFormat)
    assert (down.bits, down.group, down.ordered) == (8, 64, True)
    assert down.scheme == GroupScheme("int8", 64)
    assert quantization.format_of("model.layers.1.mlp.up_proj").scheme is None
    with_head = read_quantization(Fields({"quantization_config": config | {"lm_head": True}}))
    assert not isinstance(with_head.format_of("lm_head"), PlainFormat)
    some = config | {"modules_in_block_to_quantize": [["self_attn.q_proj"]], "dynamic": {}}
    quantization = read_quantization(Fields({"quantization_config": some}))
    assert isinstance(quantization.format_of("model.layers.1.mlp.up_proj"), PlainFormat)
    assert isinstance(quantization.format_of("model.layers.1.self_attn.q_proj"), GptqFormat)


def test_dummy_weights_are_quantized_as_the_checkpoint_would_be(original: Path) -> None:
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = CASES["awq"][1]
    checkpoint = open_checkpoint("dummy", load_format="dummy", hf_config=config)
    for kept in (False, True):
        kernels = TorchKernels(quantized=kept)
        backend = ComposedAttention(kernels, TorchCpuAttention())
        decoder = load_decoder(checkpoint, kernels, backend, torch.float32, CPU, load_format="dummy")
        values = logprobs(decoder, prompt())
        if not kept:
            expected = values
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("case", "name"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_quantization_may_be_described_in_its_own_file(
    case: str, name: str, original: Path, tmp_path: Path
) -> None:
    write, quantization = CASES[case]
    folder = rewrite(original, tmp_path / "quantized", {"_proj": write}, quantization)
    config = json.loads((folder / "config.json").read_text())
    described = config.pop("quantization_config")
    del described["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(json.dumps(described))
    expected = logprobs(load(folder / "plain"), prompt())
    torch.testing.assert_close(logprobs(load(folder), prompt()), expected, rtol=1e-4, atol=1e-4)
