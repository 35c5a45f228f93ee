"""Weights can be moved in place."""

from __future__ import annotations

import pytest
import torch

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.execution.platforms import relocate
from inflight.layers.formats.schemes import GroupScheme
from inflight.layers.triton_kernels import TritonKernels
from inflight.models.decoders.attention import SelfAttention
from inflight.models.decoders.footprint import num_bytes
from inflight.models.tensors import tensors_of
from tests.models.running import load, logprobs, prompt
from tests.support.held_bytes import storage_bytes


def test_every_tensor_is_found_once_and_can_be_moved() -> None:
    decoder = load(checkpoint_folder())
    actual = list(tensors_of(decoder))
    assert len({id(tensor) for tensor in actual}) == len(actual)
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, SelfAttention)]
    held = [decoder.final_norm, *(mixer.qkv._weight for mixer in mixers)]  # type: ignore[attr-defined]
    assert {id(tensor) for tensor in held} <= {id(tensor) for tensor in actual}
    before = logprobs(decoder, prompt())
    places = {id(tensor): tensor.data_ptr() for tensor in actual}
    relocate(decoder, torch.clone)
    assert all(tensor.data_ptr() != places[id(tensor)] for tensor in tensors_of(decoder))
    assert torch.equal(logprobs(decoder, prompt()), before)


@pytest.mark.parametrize(
    "scheme",
    [
        GroupScheme("fp8", inputs="fp8"),
        GroupScheme("int8", 32, zeros=True),
        GroupScheme("int4", 32, zeros=True),
    ],
    ids=lambda scheme: scheme.name,
)
@pytest.mark.parametrize("multiplies_fp8", [True, False])
def test_quantized_weights_are_held_once_after_they_moved(scheme: GroupScheme, multiplies_fp8: bool) -> None:
    torch.manual_seed(0)
    kernels = TritonKernels(torch.float32, "cpu")
    kernels.fp8_products = multiplies_fp8  # without them, kernels read the codes as bytes
    linear = kernels.linear(64, 16, torch.float32, False, scheme=scheme)
    linear.load(torch.randn(16, 64))
    before, rows = storage_bytes(linear), linear.embed(torch.arange(16))
    assert num_bytes(linear) == before
    relocate(linear, torch.clone)
    assert storage_bytes(linear) == before
    assert torch.equal(linear.embed(torch.arange(16)), rows)
