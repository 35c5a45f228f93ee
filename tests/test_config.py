from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from inflight.config import CacheConfig, EngineConfig, ModelConfig, ProcessConfig, SchedulerConfig
from inflight.errors import ConfigError

PARTS = (ModelConfig, CacheConfig, SchedulerConfig)


def test_flat_options_reach_their_sections() -> None:
    config = EngineConfig.create(model="m", seed=3, block_size=8, policy="fair", max_queue=5)
    assert config.model == ModelConfig("m", seed=3)
    assert config.cache == CacheConfig(block_size=8)
    assert config.scheduler == SchedulerConfig(policy="fair", max_queue=5)


def test_every_option_belongs_to_one_part() -> None:
    names = [field.name for part in PARTS for field in dataclasses.fields(part)]
    assert len(names) == len(set(names))


def test_defaults_are_those_of_the_parts() -> None:
    assert EngineConfig.create(model="m") == EngineConfig(ModelConfig("m"))


def test_error_for_unknown_options_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown option colour, size: allowed are .*model, .*block_size"):
        EngineConfig.create(model="m", size=1, colour="red")


def test_configurations_are_immutable() -> None:
    config = EngineConfig.create(model="m")
    for part in (config, config.model, config.cache, config.scheduler):
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", [""]),
        ("dtype", ["fp8", "", "Float32"]),
        ("load_format", ["pt", "gguf"]),
        ("max_model_len", [5.5, True, "8", 1, 0, -5]),
        ("block_size", ["16", 2.5, 0, -1, 1025]),
        ("kv_cache_memory", ["much", "1", 1e9, 0, -1]),
        ("num_blocks", [True, 0, -1]),
        ("gpu_memory_utilization", [0, -0.1, 1.01, float("nan"), float("inf")]),
        ("max_num_seqs", [2.5, "8", 0, -1]),
        ("max_num_batched_tokens", [0, -1]),
        ("max_kv_tokens", [0]),
        ("max_queue", [0]),
        ("seed", ["x", -1]),
        ("pipeline_depth", [0, 3, -1]),
    ],
)
def test_values_out_of_range_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            EngineConfig.create(**({"model": "m"} | {name: value}))
        assert str(caught.value).startswith(f"{name} is {value!r}: allowed is ")


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 2},
        {"block_size": 1},
        {"block_size": 1024},
        {"gpu_memory_utilization": 1.0},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_kv_tokens": 1, "max_queue": 1},
        {"pipeline_depth": None},
        {"policy": "some.module:Policy"},
        {"policy": dict},
    ],
)
def test_boundary_values_are_accepted(options: dict[str, Any]) -> None:
    config = EngineConfig.create(model="m", **options)
    for name, value in options.items():
        assert [
            getattr(part, name)
            for part in (config.model, config.cache, config.scheduler)
            if hasattr(part, name)
        ] == [value]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"heartbeat": 0},
        {"silent_after": None},
        {"kill_stalled_after": -1.0},
        {"kill_silent_after": 0},
        {"log_format": "xml"},
    ],
)
def test_process_options_are_checked(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        ProcessConfig(**wrong)
    assert ProcessConfig(max_restarts=0, kill_stalled_after=None).max_restarts == 0
    assert ProcessConfig().kill_stalled_after == 900, "by default, and after the slowest step"


def test_configuration_round_trips_through_its_options() -> None:
    config = EngineConfig.create("m", max_queue=3, block_size=8, tenant_weights={"a": 2.0}, seed=1)
    assert EngineConfig.create(**config.options()) == config
    assert EngineConfig.create(**EngineConfig.create().options()) == EngineConfig.create() == EngineConfig()


def test_options_of_vllm_are_translated() -> None:
    config = EngineConfig.create("m", disable_log_stats=True, trust_remote_code=True, tensor_parallel_size=1)
    assert config == EngineConfig.create("m")


def test_model_can_be_a_path(tmp_path: Path) -> None:
    assert EngineConfig.create(tmp_path).model.model == str(tmp_path)
    assert EngineConfig.create().model.model is None
