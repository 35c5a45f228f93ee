"""The parts of a layer: a dense MLP against float64, another MLP in its place, and layers of one part."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.layers.attention.backend import AttentionInputs
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.kernels import Residual
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.layer import Layer
from inflight.models.decoders.mlps import DenseMlp, DenseMlpSpec
from inflight.models.decoders.spec import NormPlacement, shard_of, whole_shard
from inflight.models.decoders.weights import placements
from inflight.models.tensors import LinearRows, Target, fill_random
from tests.models.decoders.test_weights import dummy
from tests.models.running import CPU, load, logprobs, prompt
from tests.support.checkpoints import FAMILIES, write_checkpoint
from tests.support.specs import builder


def norm64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("placement", NormPlacement)
def test_dense_mlp_matches_float64(placement: NormPlacement) -> None:
    torch.manual_seed(0)
    spec = replace(decoder_spec(FAMILIES["llama"]().to_dict()), norm_placement=placement)
    hidden, inner, eps = spec.hidden_size, 96, spec.norm_eps
    mlp_spec = DenseMlpSpec(inner, "silu", bias=True)
    mlp = DenseMlp(mlp_spec, builder(whole_shard(spec), TorchKernels()))
    gate, up = torch.randn(2, inner, hidden) / 8
    down = torch.randn(hidden, inner) / 8
    biases = torch.randn(2 * inner), torch.randn(hidden)
    targets = mlp.targets()
    for name, weight in (("gate_up.gate", gate), ("gate_up.up", up), ("down", down)):
        target = targets[f"mlp.{name}"]
        assert isinstance(target, LinearRows)
        assert target.count == len(weight)
        target.load(weight)
    mlp.gate_up.load_bias(biases[0])
    mlp.down.load_bias(biases[1])
    for norm in (mlp.in_norm, mlp.out_norm):
        if norm is not None:
            norm.uniform_(0.5, 1.5)
    assert (mlp.in_norm is not None, mlp.out_norm is not None) == (placement.before, placement.after)

    x, next_norm = torch.randn(5, hidden), torch.ones(hidden)
    actual = mlp(Residual(x.clone(), mlp.in_norm), next_norm)

    read = norm64(x.double(), mlp.in_norm, eps)
    gates, ups = (read @ torch.cat((gate, up)).double().T + biases[0]).chunk(2, dim=1)
    product = (torch.nn.functional.silu(gates) * ups) @ down.double().T + biases[1]
    expected = x.double() + norm64(product, mlp.out_norm, eps)
    torch.testing.assert_close(actual.x.double(), expected, rtol=1e-4, atol=1e-5)
    assert actual.norm is next_norm


class NoMlp:
    """Implements `Mlp`: adds nothing."""

    def __init__(self, in_norm: Tensor | None) -> None:
        self.in_norm = in_norm
        self.calls = 0

    def __call__(
        self,
        residual: Residual,
        next_norm: Tensor | None,
        padding_mask: Tensor | None = None,  # noqa: ARG002
    ) -> Residual:
        self.calls += 1
        return Residual(residual.x, next_norm)

    def targets(self) -> Mapping[str, Target]:
        return {}


def test_layer_takes_any_mlp() -> None:
    """An MLP that adds nothing equals a dense one whose down projection is zero."""
    decoder, other = dummy("llama", seed=1), dummy("llama", seed=1)
    dense = decoder.layers[0].mlp
    assert isinstance(dense, DenseMlp)
    dense.down.load(torch.zeros(dense.down.out_features, dense.down.in_features))
    nothing = NoMlp(dense.in_norm)
    other.layers[0] = Layer(other.layers[0].mixer, nothing)
    assert torch.equal(logprobs(other, prompt()), logprobs(decoder, prompt()))
    assert nothing.calls == 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe", "qwen3.5"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("ends_with_mlp", [False, True])
def test_layers_may_be_only_a_mixer_or_an_mlp(
    family: str, fast: bool, ends_with_mlp: bool, tmp_path: Path
) -> None:
    """Layers that are cut in two compute the same, also for some tokens alone."""
    folder, halves_folder = write_checkpoint(tmp_path / "whole", family), tmp_path / "halves"
    whole = decoder_spec(open_checkpoint(str(folder)).config)
    if not ends_with_mlp:
        whole = replace(whole, mlps=(*whole.mlps[:-1], None))
    names = whole.names.layer
    (mlp_norm,) = (module for module, target in names.items() if target == "mlp.in_norm")
    halves = replace(
        whole,
        mixers=tuple(half for mixer in whole.mixers for half in (mixer, None)),
        mlps=tuple(half for mlp in whole.mlps for half in (None, mlp)),
        names=replace(whole.names, layer={name: names[name] for name in names if name != mlp_norm}),
    )
    if not ends_with_mlp:
        halves = replace(halves, mixers=halves.mixers[:-1], mlps=halves.mlps[:-1])
    tensors, halves_tensors = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        match = re.fullmatch(r"(.*layers\.)(\d+)\.(.*)", name)
        new_name = name
        if match is not None:
            layer, module = int(match[2]), match[3]
            is_mlp = module.startswith("mlp.") or names.get(module.removesuffix(".weight"), "").startswith(
                "mlp."
            )
            if is_mlp and whole.mlps[layer] is None:
                del tensors[name]
                continue
            module = module.replace(mlp_norm, "input_layernorm")
            new_name = f"{match[1]}{2 * layer + is_mlp}.{module}"
        halves_tensors[new_name] = tensors[name]
    save_file(tensors, folder / "model.safetensors")
    shutil.copytree(folder, halves_folder)
    save_file(halves_tensors, halves_folder / "model.safetensors")
    decoders = load(folder, fast=fast, spec=whole), load(halves_folder, fast=fast, spec=halves)
    chunks, outputs = [17, 1, 22], [[16], [0], [3, 21]]
    for wanted in (None, outputs):
        expected, actual = (logprobs(decoder, prompt(), chunks, wanted) for decoder in decoders)
        assert torch.equal(actual, expected)


def test_stage_without_mixers_computes_only_the_tokens_that_are_wanted() -> None:
    whole = decoder_spec(FAMILIES["llama"]().to_dict())
    spec = replace(whole, mixers=(*whole.mixers[:-1], None))
    kernels = TorchKernels()
    stage = shard_of(spec, 0, 1, range(spec.num_layers - 1, spec.num_layers))
    attention = ComposedAttention(kernels, TorchCpuAttention())
    decoder = Decoder(spec, kernels, attention, torch.float32, CPU, shard=stage)
    fill_random(placements(decoder, dummy=True), torch.float32, CPU)
    x, tokens = torch.randn(5, spec.hidden_size), torch.tensor([1, 4])
    inputs = AttentionInputs(
        positions=torch.arange(5),
        query_starts=torch.tensor([0, 5], dtype=torch.int32),
        context_lens=torch.tensor([5], dtype=torch.int32),
        rows=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.zeros(0, 1, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(0, 5, dtype=torch.int64),
    )
    every = decoder.run_layers(x.clone(), [], inputs)
    some = decoder.run_layers(x.clone(), [], inputs, tokens)
    torch.testing.assert_close(some, every[tokens], rtol=0, atol=1e-5)
