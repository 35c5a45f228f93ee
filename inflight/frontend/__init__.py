"""Between users and token ids: prompts become requests, deltas become outputs."""

from inflight.frontend.assembler import Assembler
from inflight.frontend.front import Front
from inflight.frontend.intake import Intake, Prompt, split_prompts

__all__ = ["Assembler", "Front", "Intake", "Prompt", "split_prompts"]
