"""The parts of a layer: a dense MLP against float64, and another MLP in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.layers.kernels import Residual
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.decoder import Layer
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.mlps import DenseMlp
from inflight.models.decoders.spec import DenseMlpSpec, NormPlacement, whole_shard
from inflight.models.tensors import LinearRows, Target
from tests.models.decoders.test_weights import dummy
from tests.models.running import CPU, logprobs, prompt
from tests.support.checkpoints import FAMILIES


def norm64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("placement", NormPlacement)
def test_dense_mlp_matches_float64(placement: NormPlacement) -> None:
    torch.manual_seed(0)
    spec = replace(decoder_spec(FAMILIES["llama"]().to_dict()), norm_placement=placement)
    hidden, inner, eps = spec.hidden_size, 96, spec.norm_eps
    mlp_spec = DenseMlpSpec(inner, "silu", bias=True)
    mlp = DenseMlp(whole_shard(spec), mlp_spec, TorchKernels(), torch.float32, CPU)
    gate, up = torch.randn(2, inner, hidden) / 8
    down = torch.randn(hidden, inner) / 8
    biases = torch.randn(2 * inner), torch.randn(hidden)
    targets = mlp.targets()
    for name, weight in (("gate_up.gate", gate), ("gate_up.up", up), ("down", down)):
        target = targets[name]
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
        live: Tensor | None = None,  # noqa: ARG002
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
