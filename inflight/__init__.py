"""An LLM serving engine whose unit of scheduling is one token, not one request."""

from __future__ import annotations

from importlib import import_module
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


# vLLM's names for our objects.
_ALIASES = {
    "AsyncLLMEngine": "inflight.entrypoints.async_engine:AsyncLLM",
    "ClassificationOutput": "inflight.outputs:ClassificationOutput",
    "ClassificationRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "EmbeddingOutput": "inflight.outputs:EmbeddingOutput",
    "EmbeddingRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "EngineArgs": "inflight.entrypoints.async_engine:AsyncEngineArgs",
    "GuidedDecodingParams": "inflight.structured_outputs:StructuredOutputs",
    "PoolingRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "PromptType": "inflight.frontend.input_processor:Prompt",
    "ScoringOutput": "inflight.outputs:ScoreOutput",
    "ScoringRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "StructuredOutputsParams": "inflight.structured_outputs:StructuredOutputs",
    "TextPrompt": "builtins:dict",
    "TokensPrompt": "builtins:dict",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _ALIASES:
        module, _, attribute = _ALIASES[name].partition(":")
        return getattr(import_module(module), attribute)
    from inflight.vllm_compat.python_api import MISSING_NAMES

    if name in MISSING_NAMES:  # not AttributeError, whose message `from inflight import` would drop
        raise ImportError(f"inflight has no {name}: {MISSING_NAMES[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
