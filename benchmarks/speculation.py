"""How much drafts gain, and cost, at each batch size and acceptance: what speculation adds to the same engine.

    python -m benchmarks.speculation --shape qwen3-0.6b --dtype bfloat16 --batch 1 8
    python -m benchmarks.speculation --shape qwen3-0.6b --dtype bfloat16 --quantization int4 --right 0 0.8
    python -m benchmarks.speculation --shape qwen3.5-0.8b --dtype bfloat16 --method mtp
    python -m benchmarks.speculation --shape llama-3.1-8b --device cuda --batch 1 8 32 128 256 --right 0 0.8

The model's next token is a permutation of its last one: embeddings are so large that layers hardly change them, and the
head's rows are those of the embedding, permuted. A step costs what it costs with any weights, and the answers are
known. A drafter that knows them guesses up to three tokens at a time, each right with a probability, independently, and
the engine chooses how many to verify. The rates are output tokens per second as a caller of `LLM.generate` sees them,
and the medians of turns without and with drafts in alternation. The drafter takes no time, but with `--method mtp` the
model's own layer guesses first, and what it guessed is then replaced.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight import LLM, SamplingParams
from inflight.models.decoders.decoder import Decoder
from inflight.request import Request
from inflight.scheduling.drafts import AdaptiveSpeculation, Guess
from inflight.scheduling.model_drafts import ModelDrafter, ModelSpeculation
from inflight.scheduling.scheduler import NoSpeculation

MOST = 3  # drafts of a request in a step
EMBEDDING_STD = 300.0
USUAL_TOKENS = 1 << 15  # as most of a text, prompts and answers are among the first tokens of the vocabulary
ROWS_AT_ONCE = 8192


def permute(llm: LLM) -> list[int]:
    """Let the model follow each token with another one. Return which."""
    decoder = llm._engine.model
    assert isinstance(decoder, Decoder)
    table, head = decoder.embedding, decoder.head
    assert table is not None
    assert head is not None
    torch.manual_seed(0)
    table.normal_(0, EMBEDDING_STD)
    usual = torch.randperm(min(len(table), USUAL_TOKENS), device=table.device)
    others = len(usual) + torch.randperm(len(table) - len(usual), device=table.device)
    following = torch.cat((usual, others))
    preceding = following.argsort()
    for first in range(0, len(table), ROWS_AT_ONCE):
        rows = table[preceding[first : first + ROWS_AT_ONCE]]
        head.load(rows / (EMBEDDING_STD * rows.shape[1] ** 0.5), first)
    return [int(token_id) for token_id in following.tolist()]


class Oracle:
    """Implements `Drafter`."""

    def __init__(self, right: float, following: list[int]) -> None:
        self._right = right
        self._following = following
        self._random = random.Random(0)

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        rng, following, token = self._random, self._following, [request.token_ids[-1], *ahead][-1]
        ids = []
        for _ in range(most):
            token = following[token]
            ids.append(token if rng.random() < self._right else rng.randrange(len(following)))
        return Guess(ids, [1.0] * len(ids))

    def ended(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


class Replaced(ModelDrafter):
    """The model drafts as many tokens as an oracle then replaces."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def receive(self, request: Request, token_ids: list[int]) -> None:
        super().receive(request, self._oracle.propose(request, [], len(token_ids)).token_ids)


def drafting_with(oracle: Oracle, method: str) -> AdaptiveSpeculation:
    return (
        ModelSpeculation(Replaced(oracle), MOST) if method == "mtp" else AdaptiveSpeculation([oracle], MOST)
    )


def measure(
    llm: LLM,
    method: str,
    following: list[int],
    batch: int,
    right: list[float],
    prompt: int,
    output: int,
    turns: int,
) -> list[list[str]]:
    rng = random.Random(0)
    num_usual = min(llm.vocab_size, USUAL_TOKENS)
    prompts = [[rng.randrange(num_usual) for _ in range(prompt)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    scheduler = llm._engine.core.scheduler
    drafting = {share: drafting_with(Oracle(share, following), method) for share in right}
    rates: dict[float | None, list[float]] = {share: [] for share in (None, *right)}
    for turn in range(1 + turns):  # the first one warms up
        for share in (None, *right):
            scheduler.speculation = NoSpeculation() if share is None else drafting[share]
            llm.reset_prefix_cache()
            began_at = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began_at
            for output_of in outputs:
                tokens = [output_of.prompt_token_ids[-1], *output_of.outputs[0].token_ids]
                assert all(following[a] == b for a, b in pairwise(tokens)), "the model says something else"
            if turn:
                rates[share].append(batch * output / seconds)
    none = statistics.median(rates[None])
    rows = []
    for share in right:
        rate, stats = statistics.median(rates[share]), drafting[share].stats
        accepted = stats.num_accepted / max(1, stats.num_drafted)
        rows.append(
            [
                str(batch),
                f"{share:.0%}",
                f"{none:.1f}",
                f"{rate:.1f}",
                f"{rate / none:.2f}x",
                f"{stats.num_drafted}",
                f"{accepted:.0%}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--method", choices=("suffix", "mtp"), default="suffix")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--right", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.8, 1.0])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "hf_config": SHAPES[args.shape] | {"tie_word_embeddings": False},
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "device": args.device,
        "speculative_config": {"method": args.method},
    }
    if args.device == "cpu":
        options["num_blocks"] = 64 + max(args.batch) * (args.prompt + args.output) // 8
    if args.kv_cache_dtype:
        options["kv_cache_dtype"] = args.kv_cache_dtype
    llm = LLM(**options)
    with torch.inference_mode():
        following = permute(llm)
    rows = [
        row
        for batch in args.batch
        for row in measure(
            llm, args.method, following, batch, args.right, args.prompt, args.output, args.turns
        )
    ]
    header = ["requests", "right", "tok/s without", "with drafts", "ratio", "drafted", "accepted"]
    title = f"{args.shape}, {args.dtype}{f', {args.quantization}' if args.quantization else ''}"
    data = {"benchmark": "speculation", "rows": [dict(zip(header, row, strict=True)) for row in rows]}
    show(title, header, rows, args.json, data)


if __name__ == "__main__":
    main()
