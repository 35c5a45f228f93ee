"""The outputs of transformers for a ragged batch of prompts, one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from inflight import LLM, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE, attention_of

NUM_STEPS = 40


def _ids(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids


_SHARED = _ids(37, 1)

# Lengths of 3 to 60 tokens; the second and the fourth begin with the same 37.
PROMPTS = [_ids(3, 2), _SHARED + _ids(2, 3), _ids(17, 4), _SHARED + _ids(23, 5), _ids(9, 6)]


@dataclass(frozen=True)
class Reference:
    prompts: list[list[int]]
    tokens: list[list[int]]  # greedy, NUM_STEPS a prompt
    logprobs: list[torch.Tensor]  # of each prompt: [tokens - 1, vocab_size], row i predicts token i + 1
    smallest_margin: float  # between the two most likely tokens, over all greedy steps


@torch.inference_mode()
def transformers_reference(folder: Path) -> Reference:
    """Its greedy tokens take one look at a continuation, not one per token: the tokens that it thinks likeliest after
    each of them are the continuation itself, or differ from it where it is wrong first. So it may come from us."""
    import transformers

    attention = attention_of(transformers.AutoConfig.from_pretrained(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, detokenize=False)
    with LLM(folder, show_progress=False) as llm:
        proposed = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    tokens, logprobs, margins = [], [], []
    for prompt, ids in zip(PROMPTS, proposed, strict=True):
        logits = model(torch.tensor([prompt + ids])).logits[0]
        logprobs.append(logits[: len(prompt) - 1].log_softmax(-1))
        best = logits[len(prompt) - 1 : -1].topk(2)
        tokens.append(best.indices[:, 0].tolist())
        margins.append((best.values[:, 0] - best.values[:, 1]).min().item())
    return Reference(PROMPTS, tokens, logprobs, min(margins))
