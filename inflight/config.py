"""What the engine is told at start: frozen, composed, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from inflight.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def _require(ok: bool, name: str, given: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {given!r}: allowed is {allowed}")


def _require_integer(name: str, given: object, low: int, allowed: str, *, optional: bool = False) -> None:
    counts = isinstance(given, int) and not isinstance(given, bool) and given >= low
    _require(counts or (optional and given is None), name, given, allowed)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is held."""

    model: str
    tokenizer: str | None = None  # another folder or hub id; None means the model's own
    revision: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: what the checkpoint says, cut to what the KV budget holds
    enforce_eager: bool = False  # on a GPU: launch kernels one by one instead of replaying captured graphs
    seed: int = 0
    skip_tokenizer_init: bool = False
    # Replaces the checkpoint's config.json: with load_format="dummy", a model from a config alone.
    hf_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", self.model, "a folder or a hub id")
        _require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        _require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, ", ".join(LOAD_FORMATS))
        _require_integer(
            "max_model_len", self.max_model_len, 2, "None or an integer of at least 2", optional=True
        )
        _require_integer("seed", self.seed, 0, "an integer of at least 0")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV memory."""

    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory: int | None = None  # bytes; None: a share of what is free
    num_blocks: int | None = None  # overrides the memory figures
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        _require_integer("block_size", self.block_size, 1, "1 to 1024")
        _require(self.block_size <= 1024, "block_size", self.block_size, "1 to 1024")
        allowed = "None or a positive number of bytes"
        _require_integer("kv_cache_memory", self.kv_cache_memory, 1, allowed, optional=True)
        _require_integer("num_blocks", self.num_blocks, 1, "None or positive", optional=True)
        share = self.gpu_memory_utilization
        _require(
            isinstance(share, int | float) and 0 < share <= 1,
            "gpu_memory_utilization",
            share,
            "above 0, at most 1",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step. A policy is a name, `module:Class`, or anything that makes a Policy when called."""

    policy: str | Callable[[], Any] = "continuous"
    max_num_seqs: int | None = None  # requests in the running batch; None: the device's default
    max_num_batched_tokens: int | None = None  # tokens computed per step; None: the device's default
    # Prompts are cut so that decodes wait about so long; 0: not for that; None: the device's default.
    target_step_ms: float | None = 0.0
    max_kv_tokens: int | None = None  # tokens resident across all running requests
    max_queue: int | None = None  # waiting requests; None: no limit of its own
    pipeline_depth: int | None = None  # 1 or 2; None: the device's default
    tenant_weights: dict[str, float] | None = (
        None  # shares, for policies that share by tenant; 1 unless named
    )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_kv_tokens", "max_queue"):
            _require_integer(name, getattr(self, name), 1, "None or at least 1", optional=True)
        _require(self.pipeline_depth in (None, 1, 2), "pipeline_depth", self.pipeline_depth, "1 or 2")
        target = self.target_step_ms
        is_number = isinstance(target, int | float) and not isinstance(target, bool)
        ok = target is None or (is_number and 0 <= target < math.inf)
        _require(ok, "target_step_ms", target, "None, 0 or a positive number of milliseconds")
        weights = (self.tenant_weights or {}).values()
        ok = all(isinstance(weight, int | float) and 0 < weight < math.inf for weight in weights)
        _require(ok, "tenant_weights", self.tenant_weights, "None, or positive numbers by tenant")


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """How an engine in a process of its own is watched. All times are in seconds."""

    max_restarts: int = 3  # within `restart_window`; one more death and it stays dead
    restart_window: float = 600.0
    heartbeat: float = 1.0  # between two signs of life
    silent_after: float = 15.0  # without a sign of life before it counts as unhealthy
    stalled_after: float = 60.0  # without a step, with work to do, before it counts as unhealthy
    kill_stalled_after: float | None = None  # without a step before it is killed and restarted; None: never
    log_format: str = "text"  # of what it writes to standard error; or "json", one object a line

    def __post_init__(self) -> None:
        _require_integer("max_restarts", self.max_restarts, 0, "at least 0")
        for name in ("restart_window", "heartbeat", "silent_after", "stalled_after", "kill_stalled_after"):
            given = getattr(self, name)
            ok = given is None and name == "kill_stalled_after"
            _require(ok or (isinstance(given, int | float) and given > 0), name, given, "a positive number")
        _require(self.log_format in ("text", "json"), "log_format", self.log_format, "text or json")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of it."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @classmethod
    def create(cls, **options: Any) -> EngineConfig:
        """From flat names, as users give them; each belongs to exactly one part."""
        parts: dict[str, dict[str, Any]] = {}
        for name, part in (("model", ModelConfig), ("cache", CacheConfig), ("scheduler", SchedulerConfig)):
            parts[name] = {item.name: options.pop(item.name) for item in fields(part) if item.name in options}
        if options:
            known = [
                item.name for part in (ModelConfig, CacheConfig, SchedulerConfig) for item in fields(part)
            ]
            raise ConfigError(f"unknown option {', '.join(sorted(options))}: allowed are {', '.join(known)}")
        return cls(
            ModelConfig(**parts["model"]),
            CacheConfig(**parts["cache"]),
            SchedulerConfig(**parts["scheduler"]),
        )
