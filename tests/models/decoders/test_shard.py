"""The part of a model that each rank holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight.errors import ConfigError
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import cut_layers, meta_decoder, meta_kernels, num_bytes
from inflight.models.decoders.mlps import DenseMlpSpec
from inflight.models.decoders.spec import (
    DecoderSpec,
    check_tensor_parallel,
    shard_of,
    whole_shard,
)
from tests.support.checkpoints import FAMILIES
from tests.support.specs import attentions

PARTS = ("gate", "up", "down")


def spec(
    heads: tuple[int, int] = (4, 2), head_dim: int = 32, num_layers: int = 3, **fields: Any
) -> DecoderSpec:
    """A decoder with some other numbers of query and key/value heads."""
    qwen3 = decoder_spec(FAMILIES["qwen3"]().to_dict())
    layer = replace(attentions(qwen3)[0], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    return replace(qwen3, mixers=(layer,) * num_layers, **fields)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_part_is_on_exactly_one_rank(size: int) -> None:
    whole = spec(heads=(8, 4), vocab_size=321)
    layer = attentions(whole)[0]
    shards = [shard_of(whole, rank, size) for rank in range(size)]
    for parts, count in (
        ([layer.query_heads(shard) for shard in shards], 8),
        ([layer.kv_heads(shard) for shard in shards], 4),
        ([shard.vocab for shard in shards], 321),
        ([shard.part(97) for shard in shards], 97),
    ):
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for shard in shards:
        assert {(own.num_heads, own.num_kv_heads) for own in attentions(shard.spec)} == {
            (8 // size, 4 // size)
        }
    assert shards[0].vocab_sizes == [len(shard.vocab) for shard in shards]


def test_key_value_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    whole = spec(heads=(8, 2), head_dim=4)
    layer = attentions(whole)[0]
    shards = [shard_of(whole, rank, 8) for rank in range(8)]
    assert [layer.kv_heads(shard) for shard in shards] == [range(1)] * 4 + [range(1, 2)] * 4
    assert all(
        attentions(shard.spec)[0].num_kv_heads == 1 and layer.kv_copies(shard) == 4 for shard in shards
    )
    for shard in shards:  # the queries that a rank has read the keys that it has
        assert layer.query_heads(shard).start // (8 // 2) == layer.kv_heads(shard).start


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        (
            {"heads": (14, 2)},
            4,
            "14 attention heads and 2 key/value heads.* across 1, 2, 14",
        ),
        (
            {"heads": (12, 4)},
            3,
            "12 attention heads and 4 key/value heads.* across 1, 2, 4, 12",
        ),
        (
            {"heads": (8, 8), "mlps": (DenseMlpSpec(4, "silu"),)},
            8,
            "4 inner features and 320 tokens",
        ),
    ],
)
def test_sizes_that_cannot_be_split_are_rejected(fields: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}: .*{message}"):
        check_tensor_parallel(spec(**fields), size)


def test_stages_are_cut_by_the_bytes_they_hold() -> None:
    """The table at one end and the head at the other weigh as much as some layers."""
    whole = spec(num_layers=12, mlps=(DenseMlpSpec(96, "silu"),) * 12)
    kernels, dtype = meta_kernels("cuda", torch.float32), torch.float32

    def cut(spec: DecoderSpec, num_stages: int, context: int = 1) -> list[range]:
        return cut_layers(spec, num_stages, context, kernels, dtype)

    even = replace(whole, vocab_size=1)
    assert [len(layers) for layers in cut(even, 4)] == [3, 3, 3, 3]
    layer_bytes = num_bytes(meta_decoder(whole_shard(whole), kernels, dtype).layers[0])
    heavy = replace(whole, vocab_size=3 * layer_bytes // (dtype.itemsize * whole.hidden_size))
    stages = cut(heavy, 3)
    assert [len(layers) for layers in stages] == [3, 6, 3]
    assert [i for layers in stages for i in layers] == list(range(12))
    # With much KV memory the layers are all that counts.
    assert [len(layers) for layers in cut(heavy, 3, 1 << 24)] == [4, 4, 4]
    stage = shard_of(heavy, 0, 2, stages[1])
    assert (stage.is_first, stage.is_last, stage.spec.num_layers) == (False, False, 6)


def test_stages_are_cut_by_how_shared_mlps_are_quantized() -> None:
    """Layers that differ in nothing else have their own sizes."""
    config = FAMILIES["qwen2-moe"](num_hidden_layers=4, shared_expert_intermediate_size=4096, vocab_size=64)
    plain = [f"model.layers.{layer}.mlp.shared_expert.{part}_proj" for layer in (0, 1) for part in PARTS]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head", *plain]}
    whole = decoder_spec(config.to_dict() | {"quantization_config": quantization})
    stages = cut_layers(whole, 2, 1, meta_kernels("cuda", torch.float32), torch.float32)
    assert [len(layers) for layers in stages] == [1, 3]
