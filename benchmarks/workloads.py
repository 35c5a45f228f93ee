"""The work that benchmarks submit: prompts as token ids, and how many tokens each answer has."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 10_000  # ids drawn from [0, this]


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_input(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output(self) -> int:
        return sum(self.output_lens)


def ragged(count: int, low: int, high: int, vocab_size: int, seed: int = 0) -> Workload:
    """Prompts and outputs of uniform length, all prompts drawn first."""
    rng = random.Random(seed)
    top = min(VOCABULARY, vocab_size - 1)
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return Workload(prompts, [rng.randint(low, high) for _ in range(count)])


def steady(batch: int, prompt_len: int, output_len: int, vocab_size: int, seed: int = 0) -> Workload:
    """Equal requests: after the prompts, a decode step of constant batch."""
    rng = random.Random(seed)
    return Workload([_ids(rng, prompt_len, vocab_size) for _ in range(batch)], [output_len] * batch)


def agents(count: int, shared: int, own: int, output_len: int, vocab_size: int, seed: int = 0) -> Workload:
    """Requests that start alike, as those of agents with one system prompt and one history do. The seed changes
    only what is their own."""
    prefix = _ids(random.Random(-1), shared, vocab_size)
    rng = random.Random(seed)
    return Workload([prefix + _ids(rng, own, vocab_size) for _ in range(count)], [output_len] * count)


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    top = min(VOCABULARY, vocab_size - 1)
    return [rng.randint(0, top) for _ in range(count)]
