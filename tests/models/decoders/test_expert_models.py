"""Models with experts: layouts of their weights, config switches, bad checkpoints, and the experts of gpt-oss."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.errors import ModelError, WeightsError
from inflight.layers import torch_kernels
from inflight.layers.kernels import CLAMPED_SILU, ExpertRouting, Residual
from inflight.layers.native_kernels import cpu_kernels
from inflight.layers.torch_kernels import TorchKernels, choose_experts
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.mlps import DenseMlpSpec, ExpertsMlp, ExpertsMlpSpec
from inflight.models.decoders.spec import shard_of
from inflight.models.tensors import ExpertMatrix
from tests.models.decoders.test_weights import dummy
from tests.models.running import load, logprobs, prompt, transformers_logprobs
from tests.support.checkpoints import FAMILIES, make_model, write_checkpoint
from tests.support.specs import builder

EXPERTS = "model.layers.2.mlp.experts"
Tensors = dict[str, Tensor]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "raw weights": ("qwen3-moe", {"norm_topk_prob": False}),
    "every second layer": ("qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "no experts": ("qwen3-moe", {"num_experts": 0}),
    "one expert": ("qwen3-moe", {"num_experts": 1, "num_experts_per_tok": 1}),
    "every expert": ("qwen3-moe", {"num_experts_per_tok": 8}),
    "qwen3-moe, window": ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 6}),
    "qwen2-moe, normalised": ("qwen2-moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen2-moe, no bias": ("qwen2-moe", {"qkv_bias": False}),
    "qwen2-moe, windows": (
        "qwen2-moe",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "mixtral, no window": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 3}),
    "olmoe, normalised": ("olmoe", {"norm_topk_prob": True}),
    "olmoe, biases": ("olmoe", {"attention_bias": True}),
    "glm4-moe, no groups": ("glm4-moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "glm4-moe, no query norm": ("glm4-moe", {"use_qk_norm": False, "attention_bias": True}),
    "glm4-moe, all layers": ("glm4-moe", {"first_k_dense_replace": 0, "n_shared_experts": 1}),
    "glm4-moe, dense": ("glm4-moe", {"first_k_dense_replace": 3}),
    "granite-moe, plain": ("granite-moe", {"residual_multiplier": 1.0, "logits_scaling": 1.0}),
}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_switches_agree_with_transformers(case: str, fast: bool, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_model(family, **overrides)
    model.save_pretrained(tmp_path)
    ours = logprobs(load(tmp_path, fast=fast), prompt(), chunks=[23, 1, 16])
    torch.testing.assert_close(ours, transformers_logprobs(model, prompt()), rtol=0, atol=1e-4)


def edit(folder: Path, change: Callable[[Tensors], None]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stack(tensors: Tensors, transposed: bool) -> None:
    """Replace the tensors of single experts by one of all, as newer checkpoints have them."""
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        names = ("w1", "w3", "w2") if "block_sparse_moe" in layer else ("gate_proj", "up_proj", "down_proj")
        count = sum(name.startswith(f"{layer}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}.experts.{index}.{name}.weight") for index in range(count)])
            for name in names
        )
        router = tensors.pop(f"{layer}.gate.weight")
        layer = layer.replace("block_sparse_moe", "mlp")
        stacked = {"gate_up_proj": torch.cat((gate, up), dim=1), "down_proj": down}
        for name, tensor in stacked.items():
            tensors[f"{layer}.experts.{name}"] = tensor.mT if transposed else tensor
        tensors[f"{layer}.gate.weight"] = router


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "glm4-moe"])
def test_stacked_experts_are_those_of_single_tensors(family: str, transposed: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    expected = logprobs(load(tmp_path), prompt())
    edit(tmp_path, lambda tensors: stack(tensors, transposed))
    assert torch.equal(logprobs(load(tmp_path), prompt()), expected)


def test_new_names_of_granite_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "granite-moe")
    expected = logprobs(load(tmp_path), prompt())

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            new = name.replace("input_linear.weight", "experts.gate_up_proj")
            new = new.replace("output_linear.weight", "experts.down_proj").replace("router.layer", "router")
            tensors[new] = tensors.pop(name)

    edit(tmp_path, rename)
    assert torch.equal(logprobs(load(tmp_path), prompt()), expected)


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm4-moe")
    expected = logprobs(load(tmp_path), prompt())
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(3, 3)}))
    with pytest.raises(WeightsError, match=r"have model\.layers\.3\.eh_proj\.weight"):
        load(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(logprobs(load(tmp_path), prompt()), expected)


BAD_WEIGHTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing expert": (
        lambda tensors: [tensors.pop(f"{EXPERTS}.5.{part}_proj.weight") for part in ("gate", "up", "down")],
        rf"lack {EXPERTS}\.5\.gate_proj\.weight, .*down_proj\.weight, required",
    ),
    "missing matrix": (
        lambda tensors: tensors.pop(f"{EXPERTS}.7.down_proj.weight"),
        rf"lack {EXPERTS}\.7\.down_proj\.weight, required",
    ),
    "no experts": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name],
        r"lack .*\.experts\.0\.gate_proj\.weight.* and \d+ more",
    ),
    "missing router": (lambda tensors: tensors.pop("model.layers.2.mlp.gate.weight"), r"lack .*mlp\.gate"),
    "wrong shape": (
        lambda tensors: tensors.update({f"{EXPERTS}.1.up_proj.weight": torch.zeros(24, 63)}),
        r"experts\.1\.up_proj\.weight in .* has shape \[24, 63\]: config\.json requires \[24, 64\]",
    ),
    "index out of range": (
        lambda tensors: tensors.update({f"{EXPERTS}.8.up_proj.weight": torch.zeros(24, 64)}),
        rf"have {EXPERTS}\.8\.up_proj\.weight, which config",
    ),
    "negative index": (
        lambda tensors: tensors.update({f"{EXPERTS}.-1.up_proj.weight": torch.zeros(24, 64)}),
        rf"have {EXPERTS}\.-1\.up_proj\.weight, which config",
    ),
    "both layouts": (
        lambda tensors: tensors.update({f"{EXPERTS}.gate_up_proj": torch.zeros(8, 48, 64)}),
        rf"have {EXPERTS}\.gate_up_proj, which config",
    ),
    "experts of a dense layer": (
        lambda tensors: tensors.update({"model.layers.1.mlp.gate.weight": torch.zeros(8, 64)}),
        r"have model\.layers\.1\.mlp\.gate\.weight, which config",
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_rejected_in_one_line(case: str, tmp_path: Path) -> None:
    change, message = BAD_WEIGHTS[case]
    write_checkpoint(tmp_path, "qwen3-moe")
    edit(tmp_path, change)
    with pytest.raises(WeightsError, match=message) as rejected:
        load(tmp_path)
    assert "\n" not in str(rejected.value)


def test_config_with_more_experts_than_there_are_is_rejected_after_a_bounded_number(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3-moe")
    config = json.loads((tmp_path / "config.json").read_text())
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    edit_config(tmp_path, num_hidden_layers=4000, **{name: 4096})
    message = (
        r"the weights lack .* and \d{1,5} more, .* \(num_hidden_layers is 4000"  # not all of fifty million
    )
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)
    edit_config(tmp_path, **{name: 1 << 20})
    with pytest.raises(ModelError, match=f"{name} in config.json"):
        load(tmp_path)


def test_stacked_experts_of_a_wrong_shape_are_rejected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3-moe")
    edit(tmp_path, lambda tensors: stack(tensors, False))
    name = f"{EXPERTS}.gate_up_proj"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name][:7]}))
    with pytest.raises(WeightsError, match=r"shape \[7, 48, 64\]: config\.json requires \[8, 48, 64\]$"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts": -1}, "num_experts in config.json is -1"),
        ("qwen3-moe", {"num_experts": 8, "num_local_experts": 9}, "num_local_experts .* is 9: .* equal to"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok .* is 9: .* the number of experts, 8"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("qwen3-moe", {"norm_topk_prob": "yes"}, "norm_topk_prob .* true or false"),
        ("qwen3-moe", {"mlp_only_layers": [1.5]}, "mlp_only_layers .* a list of integers"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
        ("qwen3-moe", {"moe_intermediate_size": 1 << 30}, "moe_intermediate_size"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv in config.json is 8.0: it must be null"),
        ("glm4-moe", {"n_group": 3}, "n_group .* a divisor of the number of experts, 8"),
        ("glm4-moe", {"n_group": 8, "topk_group": 8}, "n_group .* groups of at least 2"),
        ("glm4-moe", {"topk_group": 5}, "topk_group .* at most n_group, 4"),
        ("glm4-moe", {"num_experts_per_tok": 5}, "topk_group .* leave 5 experts"),
        ("glm4-moe", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ("glm4-moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("granite-moe", {"attention_bias": True}, "attention_bias .* is True"),
        ("granite-moe", {"residual_multiplier": "1"}, "residual_multiplier"),
        ("mixtral", {"num_local_experts": None}, "no 'num_experts'"),
    ],
)
def test_bad_configs_are_rejected_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    config = FAMILIES[family]().to_dict()
    if "num_local_experts" not in changes and "num_experts" in changes:
        config.pop("num_local_experts", None)
    with pytest.raises(ModelError, match=message) as rejected:
        decoder_spec(config | changes)
    assert "\n" not in str(rejected.value)


def test_dense_and_expert_layers_are_described_per_layer() -> None:
    mlps = decoder_spec(FAMILIES["qwen3-moe"]().to_dict()).mlps
    assert [type(mlp) for mlp in mlps] == [ExpertsMlpSpec, DenseMlpSpec, ExpertsMlpSpec]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_of_gpt_oss_agree_with_transformers(fast: bool, ranks: int, expert_parallel: bool) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64, intermediate_size=40, num_local_experts=6, num_experts_per_tok=3, num_hidden_layers=1
    )
    reference = GptOssMLP(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tensors = dict(reference.state_dict())
    routing = ExpertRouting(6, 3, "chosen", has_bias=True)
    mlp = ExpertsMlpSpec(40, CLAMPED_SILU, routing, bias=True, limit=7.0)
    spec = replace(
        decoder_spec(FAMILIES["qwen3-moe"]().to_dict()), mlps=(mlp,), expert_parallel=expert_parallel
    )
    names = {
        "router": "router",
        "experts.gate_up_proj": "experts.gate_up.alternating",
        "experts.gate_up_proj_bias": "experts.gate_up_bias",
        "experts.down_proj": "experts.down.transposed",
        "experts.down_proj_bias": "experts.down_bias",
    }
    x = torch.randn(11, 64)
    actual = x.clone()
    for rank in range(ranks):  # their sums are added up here
        device_kernels = cpu_kernels() if fast else TorchKernels()
        own = ExpertsMlp(mlp, builder(shard_of(spec, rank, ranks), device_kernels))
        targets = own.targets()
        for name, target in names.items():
            for placement in targets[f"mlp.{target}"].placements(name):
                assert tuple(tensors[placement.name].shape) == placement.shape
                placement.store(tensors[placement.name], 0)
        actual += own(Residual(x.clone(), None), None).x - x
    expected = x + reference(x[None])[0][0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


MXFP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.mark.parametrize("fast", [False, True])
def test_gpt_oss_with_mxfp4_experts_equals_their_values(fast: bool, tmp_path: Path) -> None:
    """The experts as the released checkpoints hold them: 16 bytes for 32 values along the inputs, and a power of 2."""
    plain = write_checkpoint(tmp_path / "plain", "gpt-oss")
    packed = write_checkpoint(tmp_path / "packed", "gpt-oss")
    edit_config(packed, quantization_config=MXFP4_CONFIG)
    generator = torch.Generator().manual_seed(0)
    values: Tensors = {}

    def pack(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            num_experts, num_columns, num_rows = tensors.pop(name).shape
            size = num_experts, num_rows, num_columns // 32
            blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 124, size, generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
            matrix = MXFP4_VALUES[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
            values[name] = matrix.flatten(-2).mT.contiguous()

    edit(packed, pack)
    edit(plain, lambda tensors: tensors.update(values))
    expected = logprobs(load(plain, fast=fast), prompt())
    actual = logprobs(load(packed, fast=fast), prompt())
    # Compiled kernels multiply the codes, with inputs of 8 bits.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05 if fast else 1e-4)


def test_dummy_weights_route_tokens_to_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Tensor] = []

    def choose(*arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = choose_experts(*arguments)
        counts.append(torch.bincount(ids.view(-1), minlength=8))
        return ids, weights

    monkeypatch.setattr(torch_kernels, "choose_experts", choose)
    tokens = torch.randint(2000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    fields = {"hidden_size": 256, "num_hidden_layers": 12, "vocab_size": 2000, "mlp_only_layers": []}
    logprobs(dummy("qwen3-moe", seed=0, **fields), tokens)
    assert len(counts) == 12
    for layer in counts:  # 75 on average
        assert layer.min() > 25
        assert layer.max() < 150


class CountingSum:
    """Implements `Collective` for a rank whose other ranks hold zeros."""

    capturable = False

    def __init__(self) -> None:
        self.num_sums = 0

    def sum(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:  # noqa: ARG002
        raise AssertionError("nothing is gathered here")


@pytest.mark.parametrize("family", ["qwen2-moe", "glm4-moe"])
@pytest.mark.parametrize("fast", [False, True])
def test_ranks_reduce_shared_and_other_experts_at_once(family: str, fast: bool) -> None:
    spec = decoder_spec(FAMILIES[family]().to_dict())
    mlp = next(mlp for mlp in spec.mlps if isinstance(mlp, ExpertsMlpSpec))
    assert mlp.shared_inner
    collective, x, outputs = CountingSum(), torch.randn(5, spec.hidden_size), []
    for ranks_collective in (None, collective):
        shard = replace(shard_of(spec, 0, 1), collective=ranks_collective)
        device_kernels = cpu_kernels() if fast else TorchKernels()
        own = ExpertsMlp(mlp, builder(shard, device_kernels))
        torch.manual_seed(0)
        for target in own.targets().values():
            for placement in target.placements(
                "experts.{}" if isinstance(target, ExpertMatrix) else "weight"
            ):
                placement.store(torch.randn(placement.shape) * 0.1, 0)
        outputs.append(own(Residual(x.clone(), own.in_norm), None).x)
    assert collective.num_sums == 1
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_rows_of_an_expert_may_arrive_in_parts() -> None:
    """Dummy weights come a few rows at a time."""
    spec = decoder_spec(FAMILIES["qwen3-moe"]().to_dict())
    (mlp,) = {mlp for mlp in spec.mlps if isinstance(mlp, ExpertsMlpSpec)}
    weight, x = torch.randn(48, 64), torch.randn(3, 64)
    outputs = []
    for step in (48, 7):
        torch.manual_seed(0)
        own = ExpertsMlp(mlp, builder(shard_of(spec, 1, 2), TorchKernels()))
        own.experts.router.load(torch.ones(8, 64))
        gate_up, down = own.targets()["mlp.experts.gate_up"], own.targets()["mlp.experts.down"]
        assert isinstance(gate_up, ExpertMatrix)
        assert isinstance(down, ExpertMatrix)
        for expert in range(8):
            down.load(expert, torch.ones(64, 24))
            for first in range(0, 48, step):
                gate_up.load(expert, weight[first : first + step], first)
        outputs.append(own(Residual(x.clone(), None), None).x)
    assert torch.equal(outputs[0], outputs[1])
