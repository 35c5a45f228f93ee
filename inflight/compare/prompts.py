"""What the requests of a comparison ask, and in which mix.

Traffic is heavy-tailed: most questions have short answers, and a few long ones make up most of the tokens. The
shares below are those of a chat service for everyday use, not tuned to any strategy: four questions in ten are
answered in some words, three in a sentence or two, two in a paragraph, one with a story of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class PromptKind:
    """Questions whose answers have about the same length."""

    name: str
    share: int  # of ten requests
    prompts: tuple[str, ...]


KINDS = (
    PromptKind(
        "some words",
        4,
        (
            "What is the opposite of hot?",
            "What is the opposite of quiet?",
            "What is the opposite of old?",
            "What is the opposite of empty?",
            "What is the capital of Japan?",
            "What is the capital of France?",
            "What is the capital of Italy?",
            "What is the capital of Egypt?",
            "What is 12 + 11?",
            "How much is 9 minus 4?",
            "What is 7 times 8?",
            "Is the moon a star?",
            "Is a whale a fish?",
            "Is a bat a bird?",
            "How many legs does a spider have?",
            "How many legs does an ant have?",
            "What does a cow eat?",
            "What does an owl eat?",
            "Where does a camel live?",
            "What day comes after Monday?",
            "Which month comes before June?",
            "Hello!",
            "Thank you!",
            "Good morning!",
            "Name three animals.",
        ),
    ),
    PromptKind(
        "a sentence or two",
        3,
        (
            "Why does it rain?",
            "Why is the sky blue? Answer briefly.",
            "What is a magnet? Answer in one sentence.",
            "What is a volcano?",
            "What were dinosaurs?",
            "What is a token?",
            "What is a language model?",
            "What is a rainbow? Answer in one sentence.",
            "What do I need to bake bread?",
            "Who are you?",
            "What can you do?",
            "Tell me a joke.",
            "Give me a riddle.",
            "Hi, my name is Nico.",
            "Who discovered the drum?",
            "What is an island?",
            "What does a baker do?",
            "Give me a list of six vegetables.",
            "Count from one to twenty.",
            "Name the days of the week.",
            "I cannot sleep. What should I do?",
            "What is the weather like today?",
        ),
    ),
    PromptKind(
        "a paragraph",
        2,
        (
            "How do I make a good cup of tea?",
            "How do I bake bread?",
            "How do I plant a tree?",
            "Explain in detail why the sky is blue.",
            "Why is batching faster than one request at a time?",
            "What is the difference between static and continuous batching?",
            "Compare a lion and a rabbit.",
            "Compare a cat and a dog.",
            "Explain in detail why it rains.",
            "Describe an old castle.",
            "Describe a quiet harbor in the evening.",
            "Write a poem about a penguin.",
            "Write a poem about the sea.",
            "Write a letter to my friend Mia about a trip to the desert.",
            "Write a conversation between a fox and a hen about the weather.",
        ),
    ),
    PromptKind(
        "a story",
        1,
        (
            "Tell me a long story about a dragon and a baker.",
            "Please tell me a very long story about a princess and a frog.",
            "Tell me a long story about a fox and a lantern.",
            "Write a long story about a sailor and a bell.",
            "Tell me a very long story about an owl and a clock.",
            "Write a long story about a robot that finds a key.",
            "Tell me a long story about two friends, Nadia and Anna.",
            "Write a very long story about a hedgehog and a letter.",
            "Tell me a story in several chapters about a knight.",
            "Tell me a long story about a shy bear and a drum.",
        ),
    ),
)


def draw_prompts(count: int, seed: int) -> list[str]:
    """`count` prompts in the mix above; within a kind none comes twice before all came once."""
    rng = Random(seed)
    decks: dict[str, list[str]] = {kind.name: [] for kind in KINDS}
    drawn = []
    for kind in rng.choices(KINDS, weights=[kind.share for kind in KINDS], k=count):
        deck = decks[kind.name]
        if not deck:
            deck += rng.sample(kind.prompts, len(kind.prompts))
        drawn.append(deck.pop())
    return drawn
