"""Between users and token ids: prompts become requests, deltas become outputs."""

from inflight.frontend.chat import ChatRequest, NamedTool, ToolChoice, checked_tools, tool_choice_of
from inflight.frontend.chat_tokenizer import ChatTokenizer
from inflight.frontend.frontend import Frontend
from inflight.frontend.generation import Generation
from inflight.frontend.input_processor import (
    InputProcessor,
    Prompt,
    check_arguments,
    context_length_error,
    split_prompts,
)
from inflight.frontend.message_reader import MessageReader
from inflight.frontend.output_processor import OutputProcessor
from inflight.frontend.pooling import PoolingJob, PoolingProcessor, RequestContext
from inflight.frontend.pooling_inputs import Pair, PoolingInputs
from inflight.frontend.pooling_results import PooledVectors, check_top_n, ranked
from inflight.frontend.pooling_run import PoolingRun

__all__ = [
    "ChatRequest",
    "ChatTokenizer",
    "Frontend",
    "Generation",
    "InputProcessor",
    "MessageReader",
    "NamedTool",
    "OutputProcessor",
    "Pair",
    "PooledVectors",
    "PoolingInputs",
    "PoolingJob",
    "PoolingProcessor",
    "PoolingRun",
    "Prompt",
    "RequestContext",
    "ToolChoice",
    "check_arguments",
    "check_top_n",
    "checked_tools",
    "context_length_error",
    "ranked",
    "split_prompts",
    "tool_choice_of",
]
