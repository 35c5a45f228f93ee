"""An LLM serving engine whose unit of scheduling is one token, not one request."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.entrypoints.async_engine import AsyncEngine, AsyncEngineArgs, AsyncLLM
    from inflight.entrypoints.beam_search import BeamSearchParams
    from inflight.entrypoints.llm import LLM
    from inflight.errors import InflightError
    from inflight.outputs import CompletionOutput, RequestOutput
    from inflight.sampling_params import SamplingParams
    from inflight.scheduling.policy import Policy
    from inflight.structured_outputs import StructuredOutputs

__version__ = "0.1.0"

# Imported on first use, so that the command line starts without torch.
_EXPORTS = {
    "LLM": "inflight.entrypoints.llm",
    "AsyncEngine": "inflight.entrypoints.async_engine",
    "AsyncEngineArgs": "inflight.entrypoints.async_engine",
    "AsyncLLM": "inflight.entrypoints.async_engine",
    "BeamSearchParams": "inflight.entrypoints.beam_search",
    "CompletionOutput": "inflight.outputs",
    "InflightError": "inflight.errors",
    "Policy": "inflight.scheduling.policy",
    "RequestOutput": "inflight.outputs",
    "SamplingParams": "inflight.sampling_params",
    "StructuredOutputs": "inflight.structured_outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "InflightError",
    "Policy",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    from inflight.vllm_names import vllm_attribute

    return vllm_attribute(__name__, name)


class _VllmModules(MetaPathFinder):
    """Explains failed imports of modules that only vLLM has. Python asks it last."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if fullname.startswith(f"{__name__}."):
            from inflight.vllm_names import check_module

            check_module(fullname)


sys.meta_path.append(_VllmModules())


def __dir__() -> list[str]:
    return sorted(__all__)
