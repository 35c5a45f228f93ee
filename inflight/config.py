"""The configuration of engines, engine processes and the router: frozen dataclasses, checked when they are made.

Every option is declared here (see `option.py`), except those of the server (`server/config.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from os import PathLike, fspath
from typing import Any

from inflight.errors import ConfigError, shown
from inflight.option import LIMITS, MEMORY, MODEL, PYTHON, SCHEDULING, WATCHING, check, option, options_of
from inflight.vllm_names import LLM_RULES, translate_arguments


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The checkpoint, and how it is loaded."""

    model: str | None = option(
        None,
        MODEL,
        "A folder with a checkpoint, a hub id, a GGUF file, or owner/name:file.gguf.",
        unset="the built-in model",
    )
    tokenizer: str | None = option(
        None, MODEL, "A folder, hub id or GGUF file with the tokenizer, if not the model's."
    )
    chat_template: str | None = option(
        None, MODEL, "A file with a chat template, or its text.", unset="the checkpoint's"
    )
    revision: str | None = option(None, MODEL, "Branch, tag or commit of the model on the hub.")
    download_dir: str | None = option(
        None, MODEL, "Folder for downloads from the hub.", unset="the Hugging Face cache"
    )
    dtype: str = option(
        "auto",
        MODEL,
        "Data type of the weights: auto, float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto",
        MODEL,
        "auto, safetensors, or dummy for random weights.",
        choices=("auto", "safetensors", "dummy"),
    )
    quantization: str | None = option(
        None,
        MODEL,
        "Quantize the weights of a plain checkpoint while loading: fp8, int8 or int4. Quantized checkpoints need no "
        "option; for them, only the method in their config.json is accepted.",
        choices=("fp8", "int8", "int4", "compressed-tensors", "awq", "gptq", "auto-round", "mxfp4"),
        unset="weights are held as the checkpoint has them",
    )
    quantize_head: bool = option(
        False, MODEL, "With quantization, also quantize the LM head (and embeddings that are tied to it)."
    )
    device: str = option("auto", MODEL, "auto, cpu, cuda or cuda:<index>; auto uses a GPU if there is one.")
    enforce_eager: bool = option(False, MODEL, "Do not use CUDA graphs.")
    max_model_len: int | None = option(
        None,
        MODEL,
        "Maximum context length: prompt and answer together.",
        at_least=2,
        unset="the most that checkpoint and memory allow",
    )
    seed: int = option(0, MODEL, "Seed for requests that do not set one.", at_least=0)
    tool_call_parser: str | None = option(
        None,
        MODEL,
        "Format of the model's tool calls, one of those in docs/agents.md (hermes, mistral, ...), or none.",
        unset="detected from the chat template",
    )
    reasoning_parser: str | None = option(
        None,
        MODEL,
        "Format of the model's reasoning, one of those in docs/agents.md (think, mistral, harmony, ...), or none.",
        unset="detected from the chat template",
    )
    start_timeout: float = option(
        # Longer than loading one tensor from a slow disk, or compiling all kernels.
        600.0,
        MODEL,
        "Seconds without progress (loading weights, reading or writing files) after which starting an engine or a rank "
        "fails.",
        unit="seconds",
        above=0,
        at_most=604800,
    )
    skip_tokenizer_init: bool = option(False, PYTHON, "Run without a tokenizer: token ids in, token ids out.")
    hf_config: dict[str, Any] | None = option(
        None,
        PYTHON,
        "Replaces the checkpoint's config.json; with load_format dummy, no checkpoint is needed.",
    )

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError("model is '': allowed is a folder, a hub id or a GGUF file")
        check(self)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(16, MEMORY, "Tokens per KV block.", at_least=1, at_most=1024)
    enable_prefix_caching: bool = option(True, MEMORY, "Compute prefixes that prompts share only once.")
    kv_cache_memory: int | None = option(None, MEMORY, "Size of the KV cache in bytes.", at_least=1)
    num_blocks: int | None = option(
        None, MEMORY, "Number of KV blocks, instead of a memory size.", at_least=1
    )
    kv_cache_dtype: str = option(
        "auto",
        MEMORY,
        "Type of keys and values in the cache: auto, fp8 (GPU) or int8 (CPU); auto is the type that the model "
        "computes in.",
        choices=("auto", "fp8", "int8"),
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = option(
        (),
        MEMORY,
        "Layer that kv_cache_dtype leaves as it is: a number from 0 on, or sliding_window for all layers with a "
        "window; may be repeated.",
    )
    gpu_memory_utilization: float = option(
        0.9,
        MEMORY,
        "Share of the GPU's memory that the engine may use; replicas on one GPU divide it.",
        above=0,
        at_most=1,
    )

    num_neighbours: int = option(
        0, PYTHON, "Number of other engines that share this machine's memory equally.", at_least=0
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are guessed. Fields and their names are those of vLLM's `speculative_config`."""

    method: str  # auto, mtp, eagle3, draft_model, suffix, ngram or grammar
    # A checkpoint that drafts, a folder or a hub id. Without a method, it is a draft model unless
    # its config says that it is EAGLE-3 or an assistant.
    model: str | None = None
    # The most drafts of a request in a step; None: 3 if a model drafts, otherwise 16.
    num_speculative_tokens: int | None = None
    # ngram: how many of the last tokens must stand earlier in the request's own text, at most and at least.
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    # suffix: how many of the last tokens are compared, with the request's own text and with this many answers; how many
    # drafts there are for each token that matches, and how likely the last one must be, by frequency.
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SpeculationConfig:
        """Read the options that a user gave. Raises ConfigError, in one line."""
        methods = ("auto", "mtp", "eagle3", "draft_model", "suffix", "ngram", "grammar")
        known = {item.name: item for item in fields(cls)}
        if not isinstance(options, Mapping):
            raise ConfigError(f"speculative_config is {shown(options)}: it must map names to values")
        if unknown := sorted(options.keys() - known.keys()):
            raise ConfigError(f"speculative_config has {', '.join(unknown)}: allowed are {', '.join(known)}")
        if isinstance(options.get("model"), str):
            options = {"method": "draft_model", **options}
        if options.get("method") not in methods:
            method = shown(options.get("method"))
            raise ConfigError(
                f"speculative_config: method is {method}: it must be one of {', '.join(methods)}"
            )
        for name, value in options.items():
            if name in ("method", "model"):
                continue
            is_count = not isinstance(known[name].default, float)
            most = 1.0 if name.endswith("prob") else 1_000_000
            least = 0 if name.endswith(("requests", "prob")) else 1 if is_count else 0.01
            is_number = isinstance(value, int if is_count else (int, float)) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:
                noun = "an integer" if is_count else "a number"
                raise ConfigError(
                    f"speculative_config: {name} is {shown(value)}: it must be {noun} from {least} to {most:g}"
                )
        chosen = cls(**options)
        needs_model = chosen.method in ("eagle3", "draft_model")
        if needs_model != isinstance(chosen.model, str):
            needed = "name a checkpoint" if needs_model else "be left out"
            raise ConfigError(
                f"speculative_config: model is {shown(chosen.model)}: with method {chosen.method}, it must {needed}"
            )
        if chosen.prompt_lookup_min > chosen.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {chosen.prompt_lookup_min}: it must be at most "
                f"prompt_lookup_max, {chosen.prompt_lookup_max}"
            )
        return chosen


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy and limits of the scheduler. A policy is a name, `module:Class`, or a callable that returns a Policy."""

    policy: str | Callable[[], Any] = option(
        "continuous", SCHEDULING, "continuous, static, sequential, priority, fair, or module:Class."
    )
    max_num_seqs: int | None = option(
        None,
        SCHEDULING,
        "Maximum number of requests in the running batch.",
        at_least=1,
        unset="1,024 on a GPU, 256 on a CPU",
    )
    max_num_batched_tokens: int | None = option(
        None, SCHEDULING, "Maximum number of tokens per step.", at_least=1
    )
    max_kv_tokens: int | None = option(
        None, SCHEDULING, "Maximum number of tokens in the KV cache, over all running requests.", at_least=1
    )
    max_queue: int | None = option(
        None,
        LIMITS,
        "Maximum number of waiting answers, in addition to running ones; further requests get 429.",
        at_least=1,
    )
    pipeline_depth: int | None = option(
        None, SCHEDULING, "Number of steps in flight, 1 or 2.", choices=(1, 2)
    )
    target_step_ms: float | None = option(
        0.0,
        SCHEDULING,
        "Split prompts so that streams wait about this long for their next token; 0 disables this.",
        at_least=0,
        unit="milliseconds",
        unset="14 on a GPU, 100 on a CPU",
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        SCHEDULING,
        'Guess tokens ahead and verify them, which changes no token: JSON such as {"method": "suffix"} '
        "(docs/speculation.md).",
        unset="no speculation",
    )
    tenant_weights: dict[str, float] | None = option(
        None, PYTHON, "Weight of each tenant for fair policies; 1 by default."
    )

    def __post_init__(self) -> None:
        check(self)
        if self.speculative_config is not None:
            SpeculationConfig.from_options(self.speculative_config)
        weights = (self.tenant_weights or {}).values()
        if not all(isinstance(weight, int | float) and 0 < weight < math.inf for weight in weights):
            raise ConfigError(
                f"tenant_weights is {self.tenant_weights!r}: allowed is None, or positive numbers by tenant"
            )


MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """One model on several ranks, each in its own process."""

    tensor_parallel_size: int = option(
        1, MODEL, "Number of ranks that share every layer.", at_least=1, at_most=MAX_RANKS, short="-tp"
    )
    pipeline_parallel_size: int = option(
        1,
        MODEL,
        "Number of stages that the layers are split into.",
        at_least=1,
        at_most=MAX_RANKS,
        short="-pp",
    )
    enable_expert_parallel: bool = option(
        False,
        MODEL,
        "Give each tensor parallel rank some of the experts, instead of a part of each expert.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size} and pipeline_parallel_size "
                f"{self.pipeline_parallel_size}: that makes {self.num_ranks} ranks, and at most {MAX_RANKS} are allowed"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        return " and ".join(f"{name} is {value}" for name, value in asdict(self).items() if value > 1)


_PARTS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
}
# The engine's options by name; each belongs to exactly one part.
ENGINE_OPTIONS = {name: item for part in _PARTS.values() for name, item in options_of(part).items()}


def _translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under our names. vLLM's options without effect are dropped; None stands for a default."""
    dtype = options.get("dtype")
    if dtype is not None:
        options = {**options, "dtype": str(dtype).removeprefix("torch.")}
    ours = translate_arguments(options, LLM_RULES, ConfigError)
    unknown = ours.keys() - ENGINE_OPTIONS.keys()
    if unknown:
        from difflib import get_close_matches  # only imported when needed

        close = get_close_matches(min(unknown), ENGINE_OPTIONS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"unknown option {', '.join(sorted(unknown))}: {hint}allowed are {', '.join(ENGINE_OPTIONS)}"
        )
    return {name: value for name, value in ours.items() if value is not None or ENGINE_OPTIONS[name].optional}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def create(cls, model: str | PathLike[str] | None = None, **options: Any) -> EngineConfig:
        """Create a config from flat options under our names or vLLM's. Without a model, the built-in one is used."""
        options = _translate_options(options)
        options["model"] = None if model is None else fspath(model)
        parts: dict[str, Any] = {
            part: part_type(**{name: options[name] for name in options_of(part_type) if name in options})
            for part, part_type in _PARTS.items()
        }
        return cls(**parts)

    def options(self) -> dict[str, Any]:
        """Return the flat options, as `create` takes them."""
        return asdict(self.model) | asdict(self.parallel) | asdict(self.cache) | asdict(self.scheduler)


_seconds = partial(option, unit="seconds", above=0, at_most=math.inf)


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Supervision of an engine in its own process."""

    max_restarts: int = option(
        3, SCHEDULING, "Maximum number of restarts of a dead engine within ten minutes.", at_least=0
    )
    restart_window: float = _seconds(600.0, PYTHON, "Seconds over which max_restarts counts.")
    heartbeat: float = _seconds(1.0, PYTHON, "Seconds between heartbeats.")
    silent_after: float = _seconds(
        15.0, PYTHON, "Seconds without a heartbeat after which the engine is unhealthy."
    )
    stalled_after: float = _seconds(
        60.0, PYTHON, "Seconds without a step, despite pending work, after which the engine is unhealthy."
    )
    kill_silent_after: float | None = _seconds(
        60.0,
        PYTHON,
        "Seconds without a heartbeat after which the engine is killed and restarted; None: never.",
    )
    kill_stalled_after: float | None = _seconds(
        # Longer than the longest step: thousands of prompt tokens of a large model on a slow CPU take minutes.
        900.0,
        SCHEDULING,
        "Seconds without a step, despite pending work, after which the engine is killed and restarted.",
    )
    log_format: str = option(
        "text", WATCHING, "text, or json with one object per line.", choices=("text", "json")
    )
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's environment

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Several engines with the same model, each in its own process, behind one router."""

    replicas: int | None = option(
        None,
        SCHEDULING,
        "Number of engines with the same model, behind a router; requests survive the death of an engine.",
        at_least=1,
        at_most=256,
        unset="one engine without a router",
    )
    routing: str = option(
        "prefix_aware",
        SCHEDULING,
        "How a replica is chosen: by cached prefixes and load, by load only, or in turn.",
        choices=("prefix_aware", "least_loaded", "round_robin"),
    )
    failover_timeout: float = option(
        120.0,
        SCHEDULING,
        "Seconds that running requests wait for a replica when none is left.",
        at_least=0,
        unit="seconds",
    )

    ray_address: str | None = option(
        None,
        SCHEDULING,
        "Run replicas as actors of this Ray cluster: auto for the cluster of this machine, or the address of the "
        "cluster's head node.",
        unset="replicas run on this machine",
    )
    ray_num_cpus: float | None = option(
        None, SCHEDULING, "CPUs that each replica requests from Ray.", above=0, unset="one per rank"
    )
    ray_num_gpus: float | None = option(
        None,
        SCHEDULING,
        "GPUs that each replica requests from Ray; with 0.5, two replicas share a GPU.",
        at_least=0,
        unset="one per rank if the cluster has GPUs",
    )
    ray_timeout: float = option(
        600.0,
        SCHEDULING,
        "Seconds that a new replica waits for Ray to find resources, which may have to start a machine first.",
        at_least=0,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.ray_address == "":
            raise ConfigError("ray_address is '': allowed is 'auto', or an address")

    @property
    def is_enabled(self) -> bool:
        """Whether a router is needed."""
        return self.replicas is not None or self.ray_address is not None

    @property
    def on_this_machine(self) -> bool:
        """Whether engines see the same files as this process."""
        return self.ray_address is None

    @staticmethod
    def taken_from(options: dict[str, Any]) -> RouterConfig:
        """Remove the router's options from flat options and return them as a config."""
        names = options_of(RouterConfig)
        return RouterConfig(**{name: options.pop(name) for name in names if name in options})
