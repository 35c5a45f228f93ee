"""Answers of a decoder in training, to read: a plain sampling loop without a KV cache."""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.builtin.chat_format import END_OF_TEXT, IM_END, IM_START
from tools.builtin.corpus import documents
from tools.builtin.model import Decoder
from tools.builtin.tokenizer import token_id

# What a newcomer would type first; the rest of the samples comes from held-out documents.
PROMPTS = (
    "Hello!",
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short story about a fox and a lantern.",
    "Write a long story about a robot and a dragon.",
    "What is continuous batching?",
    "How do I bake bread?",
    "What is 7 plus 5?",
    "Write a poem about the moon.",
    "Who are you?",
)


@torch.no_grad()
def complete(
    model: Decoder, tokenizer: Tokenizer, prompts: list[str], max_new: int, seed: int, greedy: bool = False
) -> list[str]:
    """One continuation per prompt, without its end token: greedy, or sampled at temperature 0.7 and top-p 0.95."""
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    stops = torch.tensor([token_id(tokenizer, token) for token in (IM_END, END_OF_TEXT)], device=device)
    rows = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    limit = min(int(lengths.max()) + max_new, model.shape.max_position_embeddings)
    # Padding comes after the text of each row, where causal attention does not see it.
    ids = torch.full((len(rows), limit), int(stops[1]), device=device)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, device=device)
    ends, done = lengths.clone(), torch.zeros(len(rows), dtype=torch.bool, device=device)
    every = torch.arange(len(rows), device=device)
    while not bool(done.all()):
        logits = model(ids[:, : int(ends.max())])[every, ends - 1].float()
        if greedy:
            token = logits.argmax(dim=-1)
        else:
            token = torch.multinomial(_nucleus(logits / 0.7, 0.95), 1, generator=generator).squeeze(1)
        done |= torch.isin(token, stops) | (ends >= limit - 1) | (ends - lengths >= max_new)
        ids[every[~done], ends[~done]] = token[~done]
        ends += ~done
    return [
        tokenizer.decode(
            ids[index, int(lengths[index]) : int(ends[index])].tolist(), skip_special_tokens=False
        )
        for index in range(len(rows))
    ]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Probabilities with the unlikely tail cut off; [rows, vocab]."""
    sorted_p, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    sorted_p[sorted_p.cumsum(dim=-1) - sorted_p > top_p] = 0.0
    return torch.zeros_like(logits).scatter(1, order, sorted_p)


def sample_report(
    model: Decoder, tokenizer: Tokenizer, seed: int, count: int = 20, max_new: int = 600
) -> str:
    """`count` prompts with their answers as readable text, and how many subjects came back in the answers."""
    held_out = [
        one for one in documents(seed, 0, 4 * count, held_out=True) if not one.plain and len(one.turns) == 2
    ]
    held_out = held_out[: max(0, count - len(PROMPTS))]
    prompts = [f"{IM_START}user\n{text}{IM_END}\n{IM_START}assistant\n" for text in PROMPTS[:count]]
    answers = complete(model, tokenizer, prompts + [one.prompt for one in held_out], max_new, seed)
    wanted = [
        word.lower() in answer.lower()
        for one, answer in zip(held_out, answers[len(prompts) :], strict=True)
        for word in one.subjects
    ]
    questions = [*PROMPTS[:count], *(one.turns[0] for one in held_out)]
    blocks = [f"### {question}\n\n{answer}\n" for question, answer in zip(questions, answers, strict=True)]
    return (
        "\n".join(blocks)
        + f"\nSubjects of held-out prompts found in the answers: {sum(wanted)} of {len(wanted)}\n"
    )
