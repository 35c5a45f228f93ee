"""Between text and token ids: prompts become requests, and deltas become outputs."""

from inflight.frontend.chat import (
    ChatOptions,
    ChatRequest,
    NamedTool,
    ToolChoice,
    checked_tools,
    selected_tools,
)
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
from inflight.frontend.output_processor import MessageReader, OutputProcessor
from inflight.frontend.scoring import (
    CallOptions,
    PooledVectors,
    ScoringCall,
    ScoringJob,
    ScoringProcessor,
    check_top_n,
    ranked,
)
from inflight.frontend.scoring_inputs import EncodedText, Pair, ScoringInputs

__all__ = [
    "CallOptions",
    "ChatOptions",
    "ChatRequest",
    "ChatTokenizer",
    "EncodedText",
    "Frontend",
    "Generation",
    "InputProcessor",
    "MessageReader",
    "NamedTool",
    "OutputProcessor",
    "Pair",
    "PooledVectors",
    "Prompt",
    "ScoringCall",
    "ScoringInputs",
    "ScoringJob",
    "ScoringProcessor",
    "ToolChoice",
    "check_arguments",
    "check_top_n",
    "checked_tools",
    "context_length_error",
    "ranked",
    "selected_tools",
    "split_prompts",
]
