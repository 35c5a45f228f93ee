"""Decoder layers in one call, beside the same operations one by one: the bits must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.layers.attention.cpu import NativeAttention
from inflight.layers.formats.gguf import BlockScheme
from inflight.layers.formats.schemes import GroupScheme, Scheme
from inflight.layers.kernels import FusableLayer
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.models.decoders.attention import SelfAttention
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.weights import load_decoder
from inflight.models.quantization import QuantizedOnLoading
from tests.models.running import CPU, logprobs, prompt
from tests.support.checkpoints import write_checkpoint
from tests.support.specs import attentions

# Families with fusable layers, and how many of the leading layers are fusable.
NUM_PLAIN = {"llama": 3, "mistral": 3, "qwen2": 3, "qwen3": 3, "olmo2": 0, "mixtral": 0}


class Unfused(NativeKernels):
    def fuse(self, layers: Sequence[FusableLayer], attention: object) -> None:  # noqa: ARG002
        return None


def load(
    folder: Path,
    kernels_type: type[NativeKernels] = NativeKernels,
    dtype: torch.dtype = torch.float32,
    scheme: Scheme | None = None,
    quantized_kv: str | None = None,
) -> Decoder:
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    checkpoint, kernels = open_checkpoint(str(folder)), kernels_type(library)
    spec = decoder_spec(checkpoint.config)
    if scheme is not None:
        spec = replace(spec, quantization=QuantizedOnLoading(scheme))
    mixers = tuple(replace(mixer, quantized_kv=quantized_kv) for mixer in attentions(spec))
    spec = replace(spec, mixers=mixers)
    return load_decoder(checkpoint, kernels, NativeAttention(library), dtype, CPU, spec=spec)


def assert_equal(fused: Decoder, single: Decoder) -> None:
    ids = prompt(60)
    for chunks in (None, [17, 1, 1, 41]):
        assert torch.equal(logprobs(fused, ids, chunks), logprobs(single, ids, chunks))
    last = [[16], [0], [0], [7, 40]]
    chunks = [17, 1, 1, 41]
    assert torch.equal(logprobs(fused, ids, chunks, last), logprobs(single, ids, chunks, last))


@pytest.mark.parametrize("family", NUM_PLAIN)
def test_fused_layers_have_the_bits_of_single_operations(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    fused, single = load(folder), load(folder, Unfused)
    layers = fused._fused
    expected = NUM_PLAIN[family] and fused.spec.num_layers
    assert (0 if layers is None else layers.count) == expected
    assert_equal(fused, single)


def test_fused_layers_read_a_cache_in_int8(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3")
    assert_equal(load(folder, quantized_kv="int8"), load(folder, Unfused, quantized_kv="int8"))


SCHEMES = [None, GroupScheme("int8"), GroupScheme("int4", 32), BlockScheme(("Q8_0",))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_layers_multiply_narrow_weights(scheme: Scheme | None, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3")
    fused = load(folder, NativeKernels, torch.bfloat16, scheme)
    assert fused._fused is not None
    assert_equal(fused, load(folder, Unfused, torch.bfloat16, scheme))


def test_fused_layers_follow_a_cache_that_is_allocated_again(tmp_path: Path) -> None:
    decoder = load(write_checkpoint(tmp_path, "qwen3"))
    # `logprobs` allocates a cache for each call.
    first, kept = logprobs(decoder, prompt()), torch.ones(1 << 20)
    assert torch.equal(logprobs(decoder, prompt()), first)
    del kept


def test_fused_layers_follow_weights_that_are_loaded_again(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3")
    fused = load(folder, NativeKernels, torch.bfloat16, BlockScheme(("Q8_0",)))
    single = load(folder, Unfused, torch.bfloat16, BlockScheme(("Q8_0",)))
    first = logprobs(fused, prompt())
    for decoder in (fused, single):
        mixer = decoder.layers[0].mixer
        assert isinstance(mixer, SelfAttention)
        mixer.output.load(torch.eye(mixer.output.out_features, mixer.output.in_features))
    assert not torch.equal(logprobs(fused, prompt()), first)
    assert_equal(fused, single)


def test_layers_after_one_that_is_not_plain_run_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3-moe")  # a dense MLP in layer 1 only
    fused = load(folder)
    assert fused._fused is None
    assert_equal(fused, load(folder, Unfused))
