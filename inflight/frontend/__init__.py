"""Between users and token ids: prompts become requests, deltas become outputs."""

from inflight.frontend.frontend import Frontend
from inflight.frontend.generation import Generation
from inflight.frontend.input_processor import InputProcessor, Prompt, context_length_error, split_prompts
from inflight.frontend.output_processor import OutputProcessor

__all__ = [
    "Frontend",
    "Generation",
    "InputProcessor",
    "OutputProcessor",
    "Prompt",
    "context_length_error",
    "split_prompts",
]
