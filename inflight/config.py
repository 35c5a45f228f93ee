"""What the engine is told at start: frozen, composed, checked once.

Here every option of an engine is declared (see `option.py`). How engines in processes of their own are watched and
routed is in `process_config.py`, and what a server has beside them in `server/config.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike, fspath
from typing import Any

from inflight.errors import ConfigError
from inflight.option import LIMITS, MEMORY, MODEL, PYTHON, SCHEDULING, WATCHING, check, option, options_of
from inflight.vllm_compat.python_api import LLM_RULES, translate_arguments


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is held."""

    model: str | None = option(
        None, MODEL, "A folder with a checkpoint, or a hub id.", unset="the built-in model"
    )
    tokenizer: str | None = option(None, MODEL, "A folder or hub id to take the tokenizer from.")
    chat_template: str | None = option(
        None, MODEL, "A file with a chat template, or its text.", unset="the checkpoint's"
    )
    revision: str | None = option(None, MODEL, "Branch, tag or commit of the hub's repository.")
    download_dir: str | None = option(
        None, MODEL, "Folder for what comes from the hub.", unset="the cache of Hugging Face"
    )
    dtype: str = option(
        "auto",
        MODEL,
        "How weights are held: auto, float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto",
        MODEL,
        "auto, safetensors, or dummy for random weights.",
        choices=("auto", "safetensors", "dummy"),
    )
    device: str = option("auto", MODEL, "auto, cpu, cuda or cuda:<index>. auto: a GPU where there is one.")
    enforce_eager: bool = option(False, MODEL, "On a GPU: run without captured CUDA graphs.")
    max_model_len: int | None = option(
        None,
        MODEL,
        "Longest context: prompt and answer together.",
        at_least=2,
        unset="what the checkpoint and the memory allow",
    )
    seed: int = option(0, MODEL, "Seed of requests that give none.", at_least=0)
    tool_call_parser: str | None = option(
        None,
        MODEL,
        "How the model writes tool calls: hermes, qwen3_coder, glm45, mistral, deepseek_v3, kimi_k2, harmony, "
        "llama3_json, pythonic, or none.",
        unset="what the chat template tells",
    )
    reasoning_parser: str | None = option(
        None,
        MODEL,
        "How the model marks its reasoning: think, mistral, seed_oss, kimi_vl, harmony, or none.",
        unset="what the chat template tells",
    )
    start_timeout: float = option(
        # Longer than one tensor takes from a slow disk, or a compiler for all kernels.
        600.0,
        MODEL,
        "Seconds without progress before an engine that starts, or one of its ranks, is given up: no weights loaded, "
        "nothing read or written.",
        unit="seconds",
        above=0,
        at_most=604800,
    )
    skip_tokenizer_init: bool = option(False, PYTHON, "Token ids in, token ids out: no text.")
    hf_config: dict[str, Any] | None = option(
        None,
        PYTHON,
        "Replaces the checkpoint's config.json: with load_format dummy, a model from a config alone.",
    )

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError("model is '': allowed is a folder or a hub id")
        check(self)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV memory."""

    block_size: int = option(16, MEMORY, "Tokens in a KV block.", at_least=1, at_most=1024)
    enable_prefix_caching: bool = option(True, MEMORY, "Compute a beginning that prompts share only once.")
    kv_cache_memory: int | None = option(None, MEMORY, "Memory for keys and values, in bytes.", at_least=1)
    num_blocks: int | None = option(None, MEMORY, "KV blocks, in place of the memory figures.", at_least=1)
    gpu_memory_utilization: float = option(
        0.9,
        MEMORY,
        "Share of the GPU's memory that the engine may hold; replicas on one GPU divide it.",
        above=0,
        at_most=1,
    )

    num_neighbours: int = option(
        0, PYTHON, "Other engines that share this machine's memory: each takes its part.", at_least=0
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step. A policy is a name, `module:Class`, or anything that makes a Policy when called."""

    policy: str | Callable[[], Any] = option(
        "continuous", SCHEDULING, "continuous, static, sequential, priority, fair, or module:Class."
    )
    max_num_seqs: int | None = option(
        None,
        SCHEDULING,
        "Most requests in the running batch.",
        at_least=1,
        unset="1,024 on a GPU, 256 on a CPU",
    )
    max_num_batched_tokens: int | None = option(
        None, SCHEDULING, "Most tokens that one step computes.", at_least=1
    )
    max_kv_tokens: int | None = option(
        None, SCHEDULING, "Most tokens in KV memory over all running requests.", at_least=1
    )
    max_queue: int | None = option(
        None,
        LIMITS,
        "Waiting answers, beside those that can run at once; one more is refused with 429.",
        at_least=1,
    )
    pipeline_depth: int | None = option(None, SCHEDULING, "Steps in flight, 1 or 2.", choices=(1, 2))
    target_step_ms: float | None = option(
        0.0,
        SCHEDULING,
        "Cut prompts so that a stream waits about so many milliseconds for its next token; 0: no such limit.",
        at_least=0,
        unit="milliseconds",
        unset="14 on a GPU, 100 on a CPU",
    )
    tenant_weights: dict[str, float] | None = option(
        None, PYTHON, "Shares, for policies that share by tenant; 1 unless named."
    )

    def __post_init__(self) -> None:
        check(self)
        weights = (self.tenant_weights or {}).values()
        if not all(isinstance(weight, int | float) and 0 < weight < math.inf for weight in weights):
            raise ConfigError(
                f"tenant_weights is {self.tenant_weights!r}: allowed is None, or positive numbers by tenant"
            )


MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """One model on several ranks, each a process."""

    tensor_parallel_size: int = option(
        1, MODEL, "Ranks that share every layer.", at_least=1, at_most=MAX_RANKS, short="-tp"
    )
    pipeline_parallel_size: int = option(
        1, MODEL, "Stages that the layers are cut into.", at_least=1, at_most=MAX_RANKS, short="-pp"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size} and pipeline_parallel_size "
                f"{self.pipeline_parallel_size}: that makes {self.num_ranks} ranks, and {MAX_RANKS} is the limit"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        given = asdict(self)
        return " and ".join(f"{name} is {value}" for name, value in given.items() if value > 1)


_PARTS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
}
# The engine's options by name; each belongs to exactly one part.
ENGINE_OPTIONS = {name: found for part in _PARTS.values() for name, found in options_of(part).items()}


def _translate_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by our names. Those of vLLM that change nothing are left out, and None is the default of what has one."""
    dtype = given.get("dtype")
    if dtype is not None:
        given = {**given, "dtype": str(dtype).removeprefix("torch.")}
    ours = translate_arguments(given, LLM_RULES, ConfigError)
    unknown = ours.keys() - ENGINE_OPTIONS.keys()
    if unknown:
        from difflib import get_close_matches  # which those who make no mistake need not wait for

        close = get_close_matches(min(unknown), ENGINE_OPTIONS, 1)
        hint = f"is it {close[0]}? " if close else ""
        raise ConfigError(
            f"unknown option {', '.join(sorted(unknown))}: {hint}allowed are {', '.join(ENGINE_OPTIONS)}"
        )
    return {name: value for name, value in ours.items() if value is not None or ENGINE_OPTIONS[name].optional}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def create(cls, model: str | PathLike[str] | None = None, **options: Any) -> EngineConfig:
        """From flat names, as users give them: ours, or vLLM's. Without a model, the built-in one."""
        options = _translate_options(options)
        options["model"] = None if model is None else fspath(model)
        parts: dict[str, Any] = {
            part: kind(**{name: options[name] for name in options_of(kind) if name in options})
            for part, kind in _PARTS.items()
        }
        return cls(**parts)

    def options(self) -> dict[str, Any]:
        """What `create` makes it from."""
        return asdict(self.model) | asdict(self.parallel) | asdict(self.cache) | asdict(self.scheduler)


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """How an engine in a process of its own is watched."""

    max_restarts: int = option(
        3, SCHEDULING, "Restarts of an engine that died, within ten minutes.", at_least=0
    )
    restart_window: float = option(
        600.0, PYTHON, "Seconds in which max_restarts are allowed.", unit="seconds", above=0, at_most=math.inf
    )
    heartbeat: float = option(
        1.0, PYTHON, "Seconds between two signs of life.", unit="seconds", above=0, at_most=math.inf
    )
    silent_after: float = option(
        15.0,
        PYTHON,
        "Seconds without a sign of life before it is unhealthy.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    stalled_after: float = option(
        60.0,
        PYTHON,
        "Seconds without a step, with work to do, before it is unhealthy.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    kill_silent_after: float | None = option(
        60.0,
        PYTHON,
        "Seconds without a sign of life before it is killed and restarted; None: never.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    kill_stalled_after: float | None = option(
        # Longer than the longest step: thousands of prompt tokens of a large model on a slow CPU take minutes.
        900.0,
        SCHEDULING,
        "Seconds without a step, with work to do, before the engine is killed and restarted.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    log_format: str = option(
        "text", WATCHING, "text, or json: one object per line.", choices=("text", "json")
    )
    environment: Mapping[str, str] = field(
        default_factory=dict
    )  # variables that it has beside those of this one

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Several engines with the same model, each in a process of its own, behind one router."""

    replicas: int | None = option(
        None,
        SCHEDULING,
        "Engines with the same model, between which requests are routed; answers outlive an engine that dies.",
        at_least=1,
        at_most=256,
        unset="one engine, and no router",
    )
    routing: str = option(
        "prefix_aware",
        SCHEDULING,
        "How a replica is chosen: by cached prefixes and load, by load, or in turn.",
        choices=("prefix_aware", "least_loaded", "round_robin"),
    )
    failover_timeout: float = option(
        120.0,
        SCHEDULING,
        "Seconds that answers which have begun wait for a replica when all are gone.",
        at_least=0,
        unit="seconds",
    )

    ray_address: str | None = option(
        None,
        SCHEDULING,
        "Replicas are actors on the machines of this Ray cluster: auto for the one that this machine is part of, or "
        "the address of its head.",
        unset="replicas are processes on this machine",
    )
    ray_num_cpus: float | None = option(
        None, SCHEDULING, "CPUs that a replica asks Ray for.", above=0, unset="one for each rank"
    )
    ray_num_gpus: float | None = option(
        None,
        SCHEDULING,
        "GPUs that a replica asks Ray for; several replicas may share one: 0.5, say.",
        at_least=0,
        unset="one for each rank, where the cluster has GPUs",
    )
    ray_timeout: float = option(
        600.0,
        SCHEDULING,
        "Seconds that a new replica waits for Ray to find room, which may first have to start a machine.",
        at_least=0,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.ray_address == "":
            raise ConfigError("ray_address is '': allowed is 'auto', or an address")

    @property
    def is_wanted(self) -> bool:
        """Whether there is a router at all."""
        return self.replicas is not None or self.ray_address is not None

    @property
    def on_this_machine(self) -> bool:
        """Whether engines see the files that this process sees."""
        return self.ray_address is None

    @staticmethod
    def taken_from(options: dict[str, Any]) -> RouterConfig:
        """What of these options, flat names, is the router's; it is not among them any more."""
        names = options_of(RouterConfig)
        return RouterConfig(**{name: options.pop(name) for name in names if name in options})
