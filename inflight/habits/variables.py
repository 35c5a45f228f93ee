"""Variables of vLLM that someone may have set, and what becomes of them here.

As for flags, but what cannot be had is told and not refused. docs/from-vllm.md is the same for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from inflight.errors import ConfigError
from inflight.habits.habit import ANY, TAKEN, Habit, Habits

VLLM = "VLLM_"
# What Kubernetes sets in every container for a service of that name.
SERVICE_LINK = re.compile(r"[A-Z]+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")

VARIABLE_HABITS = Habits(
    (
        Habit("VLLM_API_KEY KEY", {"": "", ANY: "--api-key {}"}),
        Habit(
            "VLLM_LOGGING_LEVEL LEVEL",
            {
                "debug": "--log-level debug",
                "info": "--log-level info",
                "warning": "--log-level warning",
                "error": "--log-level error",
                "critical": "--log-level error",
            },
            "--log-level has debug, info, warning and error",
        ),
        Habit(
            "VLLM_USE_V1 N, VLLM_NO_USAGE_STATS N, VLLM_DO_NOT_TRACK N, VLLM_ATTENTION_BACKEND NAME, "
            "VLLM_WORKER_MULTIPROC_METHOD NAME, VLLM_TARGET_DEVICE NAME, VLLM_USE_PRECOMPILED N, "
            "VLLM_ENABLE_V1_MULTIPROCESSING N, VLLM_USE_FLASHINFER_SAMPLER N, VLLM_CACHE_ROOT PATH, "
            "VLLM_CONFIG_ROOT PATH, VLLM_HOST_IP HOST, VLLM_PORT PORT, VLLM_RPC_TIMEOUT N",
            TAKEN,
        ),
        Habit("VLLM_CPU_KVCACHE_SPACE GIB", {"0": "", ANY: "--kv-cache-memory {gib}"}),
        Habit(
            "VLLM_CPU_OMP_THREADS_BIND TEXT",
            {"auto": "", "all": ""},
            "OMP_NUM_THREADS and taskset choose the cores",
        ),
        Habit(
            "VLLM_ENGINE_ITERATION_TIMEOUT_S N",
            {},
            "--kill-stalled-after is how long an engine may make no step",
            off_matters=True,
        ),
        Habit("VLLM_HTTP_TIMEOUT_KEEP_ALIVE N", {}, "idle connections are kept for 75 s", off_matters=True),
        Habit(
            "VLLM_LOGGING_CONFIG_PATH FILE",
            {},
            "--log-level and --log-format are what there is to choose",
        ),
        Habit(
            "VLLM_USE_MODELSCOPE N",
            {},
            "models come from folders and from the hub of Hugging Face",
        ),
        Habit(
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN N",
            {},
            "--max-model-len is at most what the checkpoint allows",
        ),
        Habit(
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING N",
            {},
            "LoRA adapters are not supported yet",
        ),
        Habit("VLLM_SERVER_DEV_MODE N", {}, "there is no such mode"),
        Habit(
            "VLLM_BATCH_INVARIANT N",
            {},
            "answers never depend on their neighbours: on a CPU to the last bit, on a GPU up to rounding",
        ),
        Habit("VLLM_TORCH_PROFILER_DIR PATH", {}, "there is no profiler to switch on"),
        Habit("VLLM_PLUGINS NAMES", {}, "code that comes from elsewhere is not loaded into the server"),
    )
)


def habitual(environment: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """For every variable of vLLM that is set: what it is as flags here, and what to tell about it."""
    for name in sorted(environment):
        if name.startswith(VLLM) and not SERVICE_LINK.fullmatch(name):
            yield _read(name, environment[name])


def _read(name: str, value: str) -> tuple[list[str], str]:
    habit = VARIABLE_HABITS.find(name)
    if habit is None:
        return [], f"{name} is set: nothing here reads it"
    try:
        return habit.arguments(name, value), ""
    except ConfigError:
        return [], f"{name} is set: nothing here reads it; {habit.reason}"
