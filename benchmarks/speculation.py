"""How much drafts gain, and cost, at each batch size and acceptance: what speculation adds to the same engine.

    python -m benchmarks.speculation --shape qwen3-0.6b --dtype bfloat16 --batch 1 8
    python -m benchmarks.speculation --shape qwen3-0.6b --dtype bfloat16 --quantization int4 --right 0 0.8

Every request is generated once without drafts. Then a drafter that knows these answers guesses up to three tokens at a
time, each right with a probability, independently, and the engine chooses how many to verify. The rates are output
tokens per second as a caller of `LLM.generate` sees them, and the medians of turns without and with drafts in
alternation. The drafter takes no time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight import LLM, SamplingParams
from inflight.request import Request
from inflight.scheduling.drafts import AdaptiveSpeculation, Guess
from inflight.scheduling.scheduler import NoSpeculation

MOST = 3  # drafts of a request in a step


class Oracle:
    """Implements `Drafter`."""

    def __init__(self, right: float, answers: dict[int, list[int]], vocab_size: int) -> None:
        self._right = right
        self._answers = answers  # by the first token of the prompt
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        tokens = [*request.token_ids, *ahead]
        first = len(tokens) - request.num_prompt_tokens
        truth = self._answers[tokens[0]][first : first + most]
        rng = self._random
        ids = [token if rng.random() < self._right else rng.randrange(self._vocab_size) for token in truth]
        return Guess(ids, [1.0] * len(ids))

    def ended(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


def measure(
    llm: LLM, batch: int, right: list[float], prompt: int, output: int, turns: int
) -> list[list[str]]:
    rng = random.Random(0)
    vocab_size = llm.vocab_size
    prompts = [[index, *(rng.randrange(vocab_size) for _ in range(prompt - 1))] for index in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    scheduler = llm._engine.core.scheduler

    def run() -> tuple[float, list[list[int]]]:
        llm.reset_prefix_cache()
        began_at = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began_at
        return batch * output / seconds, [list(made.outputs[0].token_ids) for made in outputs]

    scheduler.speculation = NoSpeculation()
    _, answers = run()
    drafting = {
        share: AdaptiveSpeculation([Oracle(share, dict(enumerate(answers)), vocab_size)], MOST)
        for share in right
    }
    rates: dict[float | None, list[float]] = {share: [] for share in (None, *right)}
    for turn in range(1 + turns):  # the first one warms up
        for share in (None, *right):
            scheduler.speculation = NoSpeculation() if share is None else drafting[share]
            rate, made = run()
            assert made == answers, "drafts changed a token"
            if turn:
                rates[share].append(rate)
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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--right", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.8, 1.0])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "hf_config": SHAPES[args.shape],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "device": "cpu",
        "num_blocks": 64 + max(args.batch) * (args.prompt + args.output) // 8,
        "speculative_config": {"method": "suffix"},
    }
    llm = LLM(**options)
    rows = [
        row
        for batch in args.batch
        for row in measure(llm, batch, args.right, args.prompt, args.output, args.turns)
    ]
    header = ["requests", "right", "tok/s without", "with drafts", "ratio", "drafted", "accepted"]
    title = f"{args.shape}, {args.dtype}{f', {args.quantization}' if args.quantization else ''}"
    data = {"benchmark": "speculation", "rows": [dict(zip(header, row, strict=True)) for row in rows]}
    show(title, header, rows, args.json, data)


if __name__ == "__main__":
    main()
