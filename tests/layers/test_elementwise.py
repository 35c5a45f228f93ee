"""Norms, rotary embedding and gates against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import Residual
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels, cpu_kernels
from inflight.layers.torch_kernels import TorchKernels

CpuKernels = NativeKernels | TorchKernels


def native() -> NativeKernels:
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    return NativeKernels(library)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return native() if request.param == "native" else TorchKernels()


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_near(actual: Tensor, reference: Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), reference, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 64), (40, 1024), (5, 4, 128), (3, 2, 20)])
def test_rms_norm_matches_float64(kernels: CpuKernels, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    actual = kernels.rms_norm(x, weight, 1e-6)
    assert actual.shape == x.shape
    assert_near(actual, norm64(x, weight, 1e-6))


def test_rms_norm_of_heads_inside_a_packed_tensor_matches_float64(kernels: CpuKernels) -> None:
    torch.manual_seed(1)
    packed, weight = torch.randn(6, 7 * 32), torch.randn(32)
    for x in (
        packed.view(6, 7, 32)[:, 2:5],
        packed[:, 32:64],
        packed.view(6, 7, 32).transpose(1, 2)[..., :7],
    ):
        scale = weight[: x.shape[-1]]
        before = x.clone()
        assert_near(kernels.rms_norm(x, scale, 1e-5), norm64(before, scale, 1e-5))
        assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (33, 1000)])
def test_add_matches_torch(kernels: CpuKernels, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    x, residual = torch.randn(shape), torch.randn(shape)
    expected = x + residual
    assert torch.equal(kernels.add(residual, x), expected)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000)])
def test_sigmoid_gates_match_float64(kernels: CpuKernels, shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    x, packed = torch.randn(shape), 4 * torch.randn(shape[0], 2 * shape[1])
    for gate in (packed[:, shape[1] :], packed[:, :1]):
        expected = x.double() * gate.double().sigmoid()
        assert_near(kernels.sigmoid_gate(x.clone(), gate), expected)


def test_gate_of_another_width_is_rejected() -> None:
    with pytest.raises(ConfigError, match="a gate for each feature, or one for each token"):
        native().sigmoid_gate(torch.randn(2, 6), torch.randn(2, 3))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps_match_float64(kernels: CpuKernels, cap: float) -> None:
    x = torch.cat((torch.linspace(-100, 100, 1001), torch.linspace(-1e-3, 1e-3, 101)))
    expected = cap * torch.tanh(x.double() / cap)
    actual = kernels.softcap(x.clone(), cap)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-9)


def test_bits_of_gates_and_soft_caps_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(5)
    x, gate = torch.randn(9, 37), torch.randn(9, 37)
    whole_gate, whole_cap = native().sigmoid_gate(x.clone(), gate), native().softcap(x.clone(), 2.0)
    for row in range(9):
        own = x[row : row + 1]
        assert torch.equal(native().sigmoid_gate(own.clone(), gate[row : row + 1])[0], whole_gate[row])
        assert torch.equal(native().softcap(own.clone(), 2.0)[0], whole_cap[row])


@pytest.mark.parametrize("norm", [None, torch.linspace(0.5, 1.5, 24)])
def test_fused_operations_equal_their_parts(kernels: CpuKernels, norm: Tensor | None) -> None:
    torch.manual_seed(4)
    x = torch.randn(5, 24)
    linear = kernels.linear(24, 24, torch.float32, bias=True)
    weight, bias = torch.randn(24, 24) / 8, torch.randn(24) / 8
    linear.load(weight)
    linear.load_bias(bias)

    def normed(y: Tensor) -> Tensor:
        return y.double() if norm is None else norm64(y, norm, 1e-6)

    y = normed(x) @ weight.double().T + bias
    assert_near(linear.normed(Residual(x, norm), 1e-6), y)
    gated = torch.nn.functional.silu(y[:, :12]) * y[:, 12:]
    assert_near(linear.gated(Residual(x, norm), 1e-6, "silu"), gated)
    added = x.double() + normed(x.double() @ weight.double().T + bias)
    actual = linear.add_to(Residual(x.clone(), None), x, norm, 1e-6, next_norm=norm)
    assert_near(actual.x, added)
    assert actual.norm is norm


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 80), (64, 32), (20, 6), (8, 2)])
@pytest.mark.parametrize("num_tokens", [1, 9, 60])
def test_rotation_matches_float64(
    kernels: CpuKernels, head_dim: int, rotary_dim: int, num_tokens: int
) -> None:
    torch.manual_seed(3)
    half = rotary_dim // 2
    angles = torch.rand(50, half) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (num_tokens,))
    packed = torch.randn(num_tokens, 5, head_dim)
    before = packed.clone()
    actual = kernels.rotate(packed[:, 1:4], positions, cos_sin)
    # A rotation is a product of complex numbers.
    x = before[:, 1:4].double()
    rotation = torch.complex(*cos_sin[positions].double().view(num_tokens, 1, 2, half).unbind(2))
    rotated = torch.complex(x[..., :half].contiguous(), x[..., half:rotary_dim].contiguous()) * rotation
    reference = torch.cat((rotated.real, rotated.imag, x[..., rotary_dim:]), dim=-1)
    assert_near(actual, reference)
    untouched = torch.tensor([0, 4])
    assert torch.equal(packed[:, untouched], before[:, untouched])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (17, 3000)])
def test_gate_matches_float64(kernels: CpuKernels, activation: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(4)
    gate_up = torch.randn(shape) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        acted = gate / (1 + (-gate).exp())
    else:
        acted = gate / 2 * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh())
    actual = kernels.gate(gate_up, activation)
    torch.testing.assert_close(actual.double(), acted * up, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_far_from_zero_matches_float64(kernels: CpuKernels, activation: str) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4, 1, 1, 1, 1, 1, 1, 1]])
    actual = kernels.gate(gate_up, activation)
    torch.testing.assert_close(actual, torch.tensor([[0.0, 0, 0, 0, 89, 200, 1e4]]), rtol=1e-6, atol=1e-6)


def test_gate_propagates_nan() -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, 1.0]])
    assert native().gate(gate_up, "silu").isnan().tolist() == [[True, False]]


def test_token_has_the_same_bits_in_every_batch() -> None:
    torch.manual_seed(5)
    kernels, cos_sin = native(), torch.randn(100, 24)
    x, weight, positions = torch.randn(90, 1040), torch.randn(1040), torch.randint(0, 100, (90,))
    heads = x.view(90, 26, 40)
    normed, gated = kernels.rms_norm(x, weight, 1e-6), kernels.gate(x, "silu")
    rotated = kernels.rotate(heads.clone(), positions, cos_sin)
    for i in (0, 41, 89):
        one = slice(i, i + 1)
        assert torch.equal(kernels.rms_norm(x[one], weight, 1e-6), normed[one])
        assert torch.equal(kernels.gate(x[one], "silu"), gated[one])
        assert torch.equal(kernels.rotate(heads[one].clone(), positions[one], cos_sin), rotated[one])


def test_unknown_activation_is_rejected(kernels: CpuKernels) -> None:
    with pytest.raises(ConfigError, match="must be one of silu, gelu_tanh"):
        kernels.gate(torch.ones(1, 2), "relu")


def test_tensors_of_wrong_sizes_are_rejected() -> None:
    kernels = native()
    with pytest.raises(ConfigError, match="must be"):
        kernels.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ConfigError, match="must be equal"):
        kernels.add(torch.ones(2, 8), torch.ones(1, 8))
    with pytest.raises(ConfigError, match="cannot rotate"):
        kernels.rotate(torch.ones(2, 1, 8), torch.tensor([0]), torch.ones(1, 8))


def test_torch_kernels_keep_the_compute_dtype() -> None:
    kernels = TorchKernels(torch.bfloat16)
    linear = kernels.linear(8, 6, torch.bfloat16, bias=False)
    linear.load(torch.ones(6, 8))
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert linear(x).dtype == linear.embed(torch.tensor([1])).dtype == torch.bfloat16
    assert kernels.rms_norm(x, torch.ones(8), 1e-6).dtype == torch.bfloat16


def test_compiled_kernels_are_preferred() -> None:
    expected = TorchKernels if native_library() is None else NativeKernels
    assert isinstance(cpu_kernels(), expected)
