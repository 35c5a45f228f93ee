"""The requests of a comparison: their prompts, their lengths and their arrival times.

Chat traffic is heavy-tailed: most answers are short, and a few long ones make up most of the tokens. The shares below
resemble an everyday chat service and are not tuned to any strategy: of ten questions, four are answered in a few words,
three in a sentence or two, two in a paragraph, and one with a story of several paragraphs. Passages for rerankers have
the mix of lengths that search results have: most are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from inflight.bench.compare.arrivals import BURST, Arrival
from inflight.errors import ConfigError, ParameterError
from inflight.frontend.scoring import unsupported_task
from inflight.loading.engine import LoadedEngine
from inflight.sampling_params import SamplingParams

LENGTHS = ("real", "ragged")
REAL_MAX_TOKENS = 768  # the built-in model's longest answers have about 600 tokens
RAGGED_MAX_TOKENS = 256
RAGGED_SPREAD = 10  # the longest prompts and answers have this many times the tokens of the shortest


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests that every strategy runs."""

    num_requests: int = 64
    arrival: Arrival = BURST
    lengths: str = "real"
    max_tokens: int | None = None  # None: the default of `lengths`
    temperature: float | None = None  # None: the checkpoint's default
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ParameterError(f"num_requests is {self.num_requests}: it must be at least 1")
        if self.lengths not in LENGTHS:
            raise ParameterError(f"lengths is {self.lengths!r}: allowed are {', '.join(LENGTHS)}")
        SamplingParams(max_tokens=self.token_limit, temperature=self.temperature or 0.0)

    @property
    def token_limit(self) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        return REAL_MAX_TOKENS if self.lengths == "real" else RAGGED_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """The description of one request, from which each strategy creates its own `Request`."""

    request_id: str
    title: str  # shown to people
    prompt_ids: list[int]
    params: SamplingParams
    arrives_at: float  # seconds after the start


def build_jobs(workload: Workload, engine: LoadedEngine) -> list[Job]:
    """Return the jobs of a workload, which are the same for the same workload and model.

    Every job has its own seed, so its tokens do not depend on the strategy.
    """
    if not engine.frontend.generates:
        raise unsupported_task("generate", engine.frontend.pooling, generates=False)
    rng = Random(workload.seed)
    prompts = (
        _real_prompts(workload, engine) if workload.lengths == "real" else _ragged_prompts(workload, engine)
    )
    times = workload.arrival.times(workload.num_requests, workload.seed)
    return [
        Job(str(index), title, ids, _params(workload, engine, rng.getrandbits(63), num_output), time)
        for index, ((title, ids, num_output), time) in enumerate(zip(prompts, times, strict=True))
    ]


# A title, the prompt's token ids, and the answer's length if it is fixed.
_Prompt = tuple[str, list[int], int | None]


def _params(workload: Workload, engine: LoadedEngine, seed: int, num_output: int | None) -> SamplingParams:
    options: dict[str, Any] = {**engine.frontend.default_params, "seed": seed}
    if workload.temperature is not None:
        options["temperature"] = workload.temperature
    options["max_tokens"] = workload.token_limit if num_output is None else num_output
    return SamplingParams(**options, ignore_eos=num_output is not None)


def _real_prompts(workload: Workload, engine: LoadedEngine) -> list[_Prompt]:
    """Return chat prompts whose answers end when the model ends them."""
    tokenizer = engine.frontend.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, which chat prompts need: use --lengths ragged")
    prompts: list[_Prompt] = []
    for text in draw_prompts(workload.num_requests, workload.seed):
        if engine.frontend.chat_template:
            rendered = engine.frontend.chat_template.render([{"role": "user", "content": text}])
            ids = tokenizer.encode(rendered, add_special_tokens=False)
        else:
            ids = tokenizer.encode(text)
        prompts.append((text, ids, None))
    return prompts


def _ragged_prompts(workload: Workload, engine: LoadedEngine) -> list[_Prompt]:
    """Return prompts of random token ids; the lengths of prompts and answers are fixed and uniformly distributed."""
    rng = Random(f"{workload.seed}/ragged")
    high = min(workload.token_limit, engine.frontend.max_model_len // 2)
    low = max(1, high // RAGGED_SPREAD)
    prompts: list[_Prompt] = []
    for _ in range(workload.num_requests):
        num_prompt, num_output = rng.randint(low, high), rng.randint(low, high)
        ids = [rng.randrange(engine.frontend.input_processor.vocab_size) for _ in range(num_prompt)]
        prompts.append((f"{num_prompt} random tokens", ids, num_output))
    return prompts


# ---- chat prompts ----


@dataclass(frozen=True, slots=True)
class PromptKind:
    """Questions whose answers are about equally long."""

    name: str
    share: int  # out of ten requests
    prompts: tuple[str, ...]


KINDS = (
    PromptKind(
        "a few words",
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
    """Return `count` prompts in the mix above.

    Within a kind, no prompt is repeated before every other one has been used.
    """
    rng = Random(seed)
    decks: dict[str, list[str]] = {category.name: [] for category in KINDS}
    drawn = []
    for category in rng.choices(KINDS, weights=[category.share for category in KINDS], k=count):
        deck = decks[category.name]
        if not deck:
            deck += rng.sample(category.prompts, len(category.prompts))
        drawn.append(deck.pop())
    return drawn


# ---- pairs for rerankers ----

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

# Number of sentences per passage, and the weight of that number.
PASSAGE_LENGTHS = ((1, 30), (2, 25), (3, 15), (5, 12), (8, 10), (14, 8))


def draw_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` pairs of a question and a passage."""
    rng = Random(f"{seed}/pairs")
    sizes, weights = zip(*PASSAGE_LENGTHS, strict=True)
    pairs = []
    for size in rng.choices(sizes, weights=weights, k=count):
        passage = " ".join(rng.choice(SENTENCES) for _ in range(size))
        pairs.append((rng.choice(QUESTIONS), passage))
    return pairs
