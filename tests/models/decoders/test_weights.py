"""Loading: every tensor arrives, and weights that do not fit their config are rejected by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.errors import WeightsError
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.mlps import ExpertsMlpSpec
from inflight.models.decoders.spec import shard_of
from inflight.models.decoders.weights import check_files, load_decoder, placements
from inflight.models.tensors import LinearRows, fill, fill_random, read_headers, tensors_of
from tests.models.running import CPU, load, logprobs, prompt
from tests.support.checkpoints import FAMILIES, write_checkpoint
from tests.support.specs import attentions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "llama")


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; double underscores stand for dots."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_tensor_is_rejected(folder: Path) -> None:
    edit_weights(folder, model__norm__weight=None)
    with pytest.raises(WeightsError, match=r"lack model\.norm\.weight, required by config\.json$"):
        load(folder)


def test_surplus_tensor_is_rejected(folder: Path) -> None:
    edit_weights(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(WeightsError, match=r"have model\.layers\.0\.self_attn\.q_proj\.bias, which config"):
        load(folder)


def test_rotary_buffers_are_ignored(folder: Path) -> None:
    before = logprobs(load(folder), prompt())
    edit_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    assert torch.equal(logprobs(load(folder), prompt()), before)


def test_wrong_shape_is_rejected(folder: Path) -> None:
    edit_weights(folder, model__layers__1__mlp__down_proj__weight=torch.zeros(64, 95))
    with pytest.raises(
        WeightsError, match=r"down_proj\.weight in model\.safetensors has shape \[64, 95\].*\[64, 96\]"
    ):
        load(folder)


def test_wrong_number_format_is_rejected(folder: Path) -> None:
    edit_weights(folder, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(
        WeightsError, match=r"model\.norm\.weight .* stored as I8: it must be one of F32, BF16, F16"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("num_layers", "words"), [(2, "have .* and 6 more, which config"), (4, "lack .* and 6 more")]
)
def test_wrong_number_of_layers_is_named(folder: Path, num_layers: int, words: str) -> None:
    edit_config(folder, num_hidden_layers=num_layers)
    with pytest.raises(WeightsError, match=f"{words}.* is {num_layers}, the weights have 3 layers"):
        load(folder)


def test_wrong_architecture_is_rejected(folder: Path) -> None:
    edit_config(folder, architectures=["Qwen3ForCausalLM"], head_dim=16)
    with pytest.raises(WeightsError, match=r"lack model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(folder)


@pytest.mark.parametrize("size", [4, 100, -1])
def test_truncated_file_is_rejected(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(
        WeightsError, match=r"model\.safetensors cannot be read; it may be truncated or damaged"
    ):
        load(folder)


def test_tensor_in_two_files_is_rejected(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(WeightsError, match=f"{first.name} and again in {second.name}"):
        load(folder)


def test_tied_checkpoints_may_hold_an_equal_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen2")
    before = logprobs(load(folder), prompt())
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_weights(folder, lm_head__weight=table)
    assert torch.equal(logprobs(load(folder), prompt()), before)
    for other in (table + 1, table[1:], table.half()):
        edit_weights(folder, lm_head__weight=other.clone())
        with pytest.raises(WeightsError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
            load(folder)


def test_progress_counts_every_byte(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: seen.append((done, total)))
    expected = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert {total for _, total in seen} == {expected}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (expected, expected)


def dummy(family: str, seed: int, **overrides: Any) -> Decoder:
    config = FAMILIES[family](**overrides).to_dict()
    checkpoint = open_checkpoint("nowhere", load_format="dummy", hf_config=config)
    kernels = TorchKernels()
    attention = ComposedAttention(kernels, TorchCpuAttention())
    return load_decoder(checkpoint, kernels, attention, torch.float32, CPU, load_format="dummy", seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_reproducible_and_complete(family: str) -> None:
    first = logprobs(dummy(family, seed=1), prompt())
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(logprobs(dummy(family, seed=1), prompt()), first)
    assert not torch.equal(logprobs(dummy(family, seed=2), prompt()), first)


def test_dummy_norms_are_one_whatever_their_offset() -> None:
    decoder = dummy("gemma3", seed=0)
    norm = decoder.layers[0].in_norm
    assert norm is not None
    assert torch.equal(norm, torch.ones(64))
    assert torch.equal(decoder.final_norm, torch.ones(64))


def test_dummy_weights_are_normal_beyond_one_block() -> None:
    """More values than the block that they are cut from: still small, centred, and their own rows."""
    decoder = dummy("llama", seed=3, vocab_size=20_000, num_hidden_layers=1)
    table = decoder.embedding
    assert table is not None
    assert table.numel() > 1 << 20
    assert math.isclose(table.std().item(), 0.02, rel_tol=0.02)
    assert abs(table.mean().item()) < 1e-3
    assert len(torch.unique(table[:, 0])) > 0.9 * len(table)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_every_weight_is_placed_once(family: str) -> None:
    """Counting values: what is placed is what the decoder computes with."""
    spec = decoder_spec(FAMILIES[family]().to_dict())
    kernels = TorchKernels()
    decoder = Decoder(spec, kernels, ComposedAttention(kernels, TorchCpuAttention()), torch.float32, CPU)
    placed = list(placements(decoder))
    assert len({placement.name for placement in placed}) == len(placed)
    weights = sum(math.prod(placement.shape) for placement in placed if placement.dummy is None)
    targets = [target for layer in decoder.layers for target in layer.targets().values()]
    linears = {id(target.linear): target.linear for target in targets if isinstance(target, LinearRows)}
    experts = [mlp for mlp in spec.mlps if isinstance(mlp, ExpertsMlpSpec)]
    # Two of attention; gate and up, and down of a dense MLP; or a router, a shared MLP and its gate.
    shared = sum(2 * (mlp.shared_inner > 0) + mlp.has_shared_gate for mlp in experts)
    gates = 2 * spec.num_layers * (spec.layer_inputs is not None)
    assert len(linears) == 4 * spec.num_layers - len(experts) + shared + gates
    assert decoder.head is not None
    expected = sum(linear.in_features * linear.out_features for linear in [*linears.values(), decoder.head])
    hidden = spec.hidden_size
    expected += sum(3 * mlp.routing.num_experts * mlp.inner * hidden for mlp in experts)
    for layer in attentions(spec):
        expected -= layer.kv_size * hidden * layer.values_are_keys  # placed as keys
        expected += (layer.query_size + 2 * layer.kv_size) * layer.qkv_bias + hidden * layer.output_bias
    for mlp in experts:
        num_biases = 1 + 2 * mlp.inner + hidden  # of the router and of an expert
        expected += mlp.routing.num_experts * (num_biases if mlp.bias else 0)
    expected += 0 if decoder.embedding is None else decoder.embedding.numel()
    if decoder.layer_inputs is not None:
        expected += decoder.layer_inputs.table.numel() * (spec.vocab_size + hidden) // spec.vocab_size
    assert weights == expected


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rank_reads_all_that_it_keeps(family: str, expert_parallel: bool, tmp_path: Path) -> None:
    """It holds the same as if it had read whole tensors."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, family)))
    spec = replace(decoder_spec(checkpoint.config), expert_parallel=expert_parallel)
    shard, stored = shard_of(spec, 1, 2), read_headers(checkpoint.weight_files)
    names = check_files(shard, stored)
    kernels, held = TorchKernels(), []
    for reads_all in (False, True):
        attention = ComposedAttention(kernels, TorchCpuAttention())
        decoder = Decoder(spec, kernels, attention, torch.float32, CPU, shard=shard)
        needed = {placement.name: placement for placement in placements(decoder, *names)}
        if reads_all:
            needed = {name: replace(placement, needed=(), first=0) for name, placement in needed.items()}
        fill(needed, stored)
        held.append(list(tensors_of(decoder.layers)))
    for read, whole in zip(*held, strict=True):
        assert torch.equal(read, whole)


def test_refilling_replaces_all_weights() -> None:
    """Filling starts from any state: no weight is left as it was."""
    decoder = dummy("qwen2", seed=1)
    fill_random(placements(decoder), decoder.dtype, decoder.device, seed=2)
    assert torch.equal(logprobs(decoder, prompt()), logprobs(dummy("qwen2", seed=2), prompt()))
