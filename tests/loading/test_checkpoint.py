"""Defaults that a checkpoint recommends: dtype, EOS tokens, sampling parameters, context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.errors import ConfigError, ModelError
from inflight.loading.checkpoint import default_sampling, eos_token_ids, resolve_dtype, resolve_length
from inflight.models.decoders.families import decoder_spec
from inflight.sampling_params import SamplingParams
from tests.models.decoders.test_families import PHI3


def test_eos_ids_of_both_files_count_once_each() -> None:
    assert eos_token_ids({"eos_token_id": 2}, {"eos_token_id": [7, 2]}) == (7, 2)
    assert eos_token_ids({"eos_token_id": None, "text_config": {"eos_token_id": 5}}, {}) == (5,)
    assert eos_token_ids({}, {}) == ()
    with pytest.raises(ModelError, match="eos_token_id is 'end'"):
        eos_token_ids({"eos_token_id": "end"}, {})


def test_sampling_defaults_are_fields_of_sampling_params() -> None:
    recommended: dict[str, Any] = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 64,
        "pad_token_id": 3,
    }
    fields = default_sampling(recommended)
    params = SamplingParams(**fields)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.1)
    assert (params.repetition_penalty, params.max_tokens) == (1.05, 64)
    assert default_sampling(recommended | {"do_sample": True}) == fields
    greedy = default_sampling(recommended | {"do_sample": False})
    assert greedy == {"repetition_penalty": 1.05, "max_tokens": 64}
    assert default_sampling({"temperature": None}) == {}


def test_dtype_is_the_configured_or_the_checkpoints_own() -> None:
    assert resolve_dtype("auto", {"dtype": "bfloat16"}) is torch.bfloat16
    assert resolve_dtype("auto", {"torch_dtype": "float16"}) is torch.float16
    assert resolve_dtype("auto", {"text_config": {"torch_dtype": "torch.bfloat16"}}) is torch.bfloat16
    assert resolve_dtype("auto", {}) is torch.float32
    assert resolve_dtype("float32", {"dtype": "bfloat16"}) is torch.float32
    with pytest.raises(ModelError, match="'int8': it must be one of float32"):
        resolve_dtype("auto", {"dtype": "int8"})


def test_context_is_limited_by_the_checkpoint() -> None:
    long = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spec = decoder_spec(PHI3 | {"rope_scaling": long, "original_max_position_embeddings": 256})
    assert (spec.default_context, spec.max_position) == (256, 1024)


def test_longest_length_is_configured_or_the_default() -> None:
    assert resolve_length(1024, 256, None) == 256
    assert resolve_length(1024, 256, 1024) == 1024
    with pytest.raises(
        ConfigError, match=r"max_model_len is 1025: the checkpoint supports at most 1024 positions"
    ):
        resolve_length(1024, 256, 1025)
