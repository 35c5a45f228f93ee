"""Questions and passages for a comparison of rerankers, in a mix of lengths as searches return them: most are short."""

from __future__ import annotations

from random import Random

QUESTIONS = (
    "why does it rain?",
    "how do bees make honey?",
    "what is continuous batching?",
    "how is bread baked?",
    "why is the sky blue?",
    "how do plants grow?",
)

SENTENCES = (
    "Warm air takes up water from seas and lakes and carries it upwards.",
    "When the air cools, the water gathers into drops, and the drops fall as rain.",
    "Clouds are made of very small drops that float until they join.",
    "In the mountains it rains more often, since the air must rise to cross them.",
    "Bees collect nectar from flowers and bring it to the hive.",
    "In the hive the nectar is passed from bee to bee until most of its water is gone.",
    "The comb is closed with wax, and the honey keeps for years.",
    "A baker mixes flour, water, salt and yeast and lets the dough rest.",
    "In a hot oven the crust turns brown while the inside stays soft.",
    "Sunlight is scattered by the air, and blue light is scattered most.",
    "In the evening the light takes a longer way, and what is left of it is red.",
    "Plants take up water through their roots and light through their leaves.",
    "A seed holds enough food for the first leaves, and then the plant feeds itself.",
    "A server that batches requests at every step need not wait for the longest of them.",
    "Requests join and leave the batch at every step, so no slot stands empty.",
    "Memory is given out in small blocks, so that long and short texts share it well.",
    "The harbour was quiet, and the boats lay side by side.",
    "She closed the book, put on her coat and went out into the street.",
    "The train leaves at nine and arrives before noon.",
    "Two cups of rice are enough for four people.",
)

# Sentences of a passage and how often passages have so many.
LENGTHS = ((1, 30), (2, 25), (3, 15), (5, 12), (8, 10), (14, 8))


def draw_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """A question and a passage each."""
    rng = Random(f"{seed}/pairs")
    sizes, weights = zip(*LENGTHS, strict=True)
    pairs = []
    for size in rng.choices(sizes, weights=weights, k=count):
        passage = " ".join(rng.choice(SENTENCES) for _ in range(size))
        pairs.append((rng.choice(QUESTIONS), passage))
    return pairs
