"""vLLM's environment variables.

They are treated like flags, except that an unsupported variable causes a warning instead of an error. docs/from-vllm.md
documents the same table, and tests/vllm_compat checks that both agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from inflight.errors import ConfigError
from inflight.vllm_rules import ANY, IGNORED, CompatRule, CompatRules

PREFIX = "VLLM_"
# Variables that Kubernetes sets in every container for a service, which may be called "vllm" or "inflight".
SERVICE_LINK = re.compile(r"[A-Z]+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")

VARIABLE_RULES = CompatRules(
    (
        CompatRule("VLLM_API_KEY KEY", {"": "", ANY: "--api-key {}"}),
        CompatRule(
            "VLLM_LOGGING_LEVEL LEVEL",
            {
                "debug": "--log-level debug",
                "info": "--log-level info",
                "warning": "--log-level warning",
                "error": "--log-level error",
                "critical": "--log-level error",
            },
            "--log-level accepts debug, info, warning and error",
        ),
        CompatRule(
            "VLLM_USE_V1 N, VLLM_NO_USAGE_STATS N, VLLM_DO_NOT_TRACK N, VLLM_ATTENTION_BACKEND NAME, "
            "VLLM_WORKER_MULTIPROC_METHOD NAME, VLLM_TARGET_DEVICE NAME, VLLM_USE_PRECOMPILED N, "
            "VLLM_ENABLE_V1_MULTIPROCESSING N, VLLM_USE_FLASHINFER_SAMPLER N, VLLM_CACHE_ROOT PATH, "
            "VLLM_CONFIG_ROOT PATH, VLLM_HOST_IP HOST, VLLM_PORT PORT, VLLM_RPC_TIMEOUT N",
            IGNORED,
        ),
        CompatRule("VLLM_CPU_KVCACHE_SPACE GIB", {"0": "", ANY: "--kv-cache-memory {gib}"}),
        CompatRule(
            "VLLM_CPU_OMP_THREADS_BIND TEXT", {"auto": "", "all": ""}, "use OMP_NUM_THREADS and taskset"
        ),
        CompatRule(
            "VLLM_ENGINE_ITERATION_TIMEOUT_S N",
            {},
            "--kill-stalled-after sets how long an engine may go without a step",
            off_matters=True,
        ),
        CompatRule(
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE N", {}, "idle connections are closed after 75 s", off_matters=True
        ),
        CompatRule("VLLM_LOGGING_CONFIG_PATH FILE", {}, "use --log-level and --log-format"),
        CompatRule(
            "VLLM_USE_MODELSCOPE N", {}, "models are loaded from folders or from the Hugging Face Hub"
        ),
        CompatRule(
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN N", {}, "--max-model-len cannot exceed the checkpoint's limit"
        ),
        CompatRule("VLLM_ALLOW_RUNTIME_LORA_UPDATING N", {}, "LoRA adapters are not supported yet"),
        CompatRule("VLLM_SERVER_DEV_MODE N", {}, "there is no development mode"),
        CompatRule(
            "VLLM_BATCH_INVARIANT N",
            {},
            "results never depend on the rest of the batch: bit-identical on a CPU, up to rounding on a GPU",
        ),
        CompatRule("VLLM_TORCH_PROFILER_DIR PATH", {}, "there is no built-in profiler"),
        CompatRule("VLLM_PLUGINS NAMES", {}, "third-party code is not loaded into the server"),
    )
)


def translate_environment(environment: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """Yield, for every vLLM variable that is set, its flags here and a warning, either of which may be empty."""
    for name in sorted(environment):
        if name.startswith(PREFIX) and not SERVICE_LINK.fullmatch(name):
            yield _translate(name, environment[name])


def _translate(name: str, value: str) -> tuple[list[str], str]:
    rule = VARIABLE_RULES.find(name)
    if rule is None:
        return [], f"{name} is set, but has no effect"
    try:
        return rule.arguments(name, value), ""
    except ConfigError:
        return [], f"{name} is set, but has no effect: {rule.reason}"
