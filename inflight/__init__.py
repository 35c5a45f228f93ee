"""An LLM serving engine whose unit of scheduling is one token, not one request."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.async_engine import AsyncEngine
    from inflight.async_llm import AsyncEngineArgs, AsyncLLM
    from inflight.beam_search import BeamSearchParams
    from inflight.errors import InflightError
    from inflight.llm import LLM
    from inflight.outputs import CompletionOutput, RequestOutput
    from inflight.request import SamplingParams
    from inflight.scheduling.policy import Policy
    from inflight.structured_outputs import StructuredOutputs

__version__ = "0.1.0"

# Imported when first used: the command line starts without loading torch.
_EXPORTS = {
    "LLM": "inflight.llm",
    "AsyncEngine": "inflight.async_engine",
    "AsyncEngineArgs": "inflight.async_llm",
    "AsyncLLM": "inflight.async_llm",
    "BeamSearchParams": "inflight.beam_search",
    "CompletionOutput": "inflight.outputs",
    "InflightError": "inflight.errors",
    "Policy": "inflight.scheduling.policy",
    "RequestOutput": "inflight.outputs",
    "SamplingParams": "inflight.request",
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


# Other names that vLLM has for them.
_ALIASES = {
    "AsyncLLMEngine": "AsyncLLM",
    "EngineArgs": "AsyncEngineArgs",
    "GuidedDecodingParams": "StructuredOutputs",
    "StructuredOutputsParams": "StructuredOutputs",
}


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
