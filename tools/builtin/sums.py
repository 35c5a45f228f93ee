"""Small sums that a checkpoint answers by heart, without a tool: how many of each kind are right.

python -m tools.builtin.sums FOLDER
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

from tools.builtin.chat_format import IM_END, IM_START
from tools.builtin.export import load
from tools.builtin.model import Decoder
from tools.builtin.sample import complete

_KINDS = (("plus", 10), ("plus", 20), ("plus", 50), ("minus", 10), ("minus", 20), ("times", 10))


class SmallSum(NamedTuple):
    kind: str
    question: str
    result: int


def small_sums(count: int, seed: int = 1) -> Iterator[SmallSum]:
    """`count` of each kind, always the same ones."""
    rng = Random(seed)
    for word, top in _KINDS:
        for _ in range(count):
            x, y = sorted((rng.randint(0, top), rng.randint(0, top)), reverse=word == "minus")
            result = {"plus": x + y, "minus": x - y, "times": x * y}[word]
            yield SmallSum(f"{word} up to {top}", f"What is {x} {word} {y}?", result)


def sum_report(model: Decoder, tokenizer: Tokenizer, count: int = 40) -> str:
    """One line per kind; the answers are greedy."""
    asked = list(small_sums(count))
    prompts = [f"{IM_START}user\n{one.question}{IM_END}\n{IM_START}assistant\n" for one in asked]
    answers = complete(model, tokenizer, prompts, max_new=24, seed=0, greedy=True)
    right: dict[str, int] = {}
    for one, answer in zip(asked, answers, strict=True):
        numbers = re.findall(r"\d+", answer)
        right[one.kind] = right.get(one.kind, 0) + (numbers[-1:] == [str(one.result)])
    lines = [f"{kind:14} {good:3} of {count}" for kind, good in right.items()]
    total = sum(right.values())
    return "\n".join(
        ["Sums by heart", *lines, f"{'all':14} {total:3} of {len(asked)} ({total / len(asked):.1%})\n"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a checkpoint of the built-in model for small sums.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40, help="of each kind")
    arguments = parser.parse_args()
    model = load(arguments.folder)
    print(sum_report(model, Tokenizer.from_file(str(arguments.folder / "tokenizer.json")), arguments.count))


if __name__ == "__main__":
    main()
