"""What transformers makes of a ragged batch of prompts, one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.checkpoints import VOCAB_SIZE

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
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, logprobs, margins = [], [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        logprobs.append(model(ids).logits[0, :-1].log_softmax(-1))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=NUM_STEPS,
            min_new_tokens=NUM_STEPS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.stack(out.logits)[:, 0].topk(2).values  # [NUM_STEPS, 2]
        margins.append((best[:, 0] - best[:, 1]).min().item())
    return Reference(PROMPTS, tokens, logprobs, min(margins))
