"""How much the engine's own drafters gain on tasks of the built-in model: what speculation adds to the same engine.

    python -m benchmarks.drafters --task edit quote json --batch 1 2 4 8 [--cpu-time]

`edit`: after a story about an animal, the same about another; `quote`: that story once more. Questions to which the
model tells a new story are left out: at least 70% of the words must be those of the first one. `json`: an object with
the values of the question, of a schema whose keys are half of the answer. Nobody's answers are known before: caches are
cleared before each turn. The rates are output tokens per second as a caller of `LLM.generate` sees them, and the
medians of turns without and with drafts in alternation. `benchmarks/speculation.py` says what drafts of a known
acceptance gain.

With --cpu-time, everything runs on one core and counts its own time on it, as far as other programs let it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from benchmarks.report import show
from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.scheduling.scheduler import NoSpeculation, Speculation

MIN_ALIKE = 0.7
ANIMALS = (
    *("cat", "dog", "fox", "bear", "mouse", "horse", "owl", "frog", "rabbit"),
    *("wolf", "hen", "goose", "pig", "goat", "cow", "duck", "snail", "crow"),
)
NAMES = ("Anna", "Tom", "Lily", "Ben", "Stella", "Paul")
FAMILY_NAMES = ("Baker", "King", "Miller", "Long", "Fisher", "Stone")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "family_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_married": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])


def requests(llm: LLM, name: str, batch: int) -> tuple[list[Any], Any]:
    """Return the prompts and parameters of a task."""
    if name == "json":
        constraint = StructuredOutputs(json=SCHEMA)
        params: Any = [
            SamplingParams(
                temperature=0.7, top_p=0.95, seed=seed, max_tokens=200, structured_outputs=constraint
            )
            for seed in range(batch)
        ]
        rng = random.Random(0)
        chats = [
            [user("As JSON: " + ", ".join(f"{key} {value}" for key, value in person(rng).items()))]
            for _ in range(batch)
        ]
    else:
        params = SamplingParams(temperature=0, max_tokens=300)
        chats = [[user(f"Tell me a story about a {animal}.")] for animal in ANIMALS]
        told = [made.outputs[0].text for made in llm.chat(chats, params, use_tqdm=False)]
        chats = [
            [
                user(f"Tell me a story about a {animal}."),
                {"role": "assistant", "content": story},
                user(request),
            ]
            for animal, story in zip(ANIMALS, told, strict=True)
            for request in (
                ["Tell me that story again."]
                if name == "quote"
                else [f"Tell me a story about a {other}." for other in ANIMALS[:3] if other != animal]
            )
        ]
        answers = [made.outputs[0].text for made in llm.chat(chats, params, use_tqdm=False)]
        alike = [
            SequenceMatcher(None, chat[1]["content"].split(), answer.split()).ratio()
            for chat, answer in zip(chats, answers, strict=True)
        ]
        chats = [chat for chat, ratio in zip(chats, alike, strict=True) if ratio >= MIN_ALIKE][:batch]
        assert len(chats) == batch, f"the model does this only {len(chats)} times"
    prompts = [
        output.prompt_token_ids for output in llm.chat(chats, SamplingParams(max_tokens=1), use_tqdm=False)
    ]
    return prompts, params


def person(rng: random.Random) -> dict[str, str]:
    """Return a value for each key of the schema."""
    values = {
        "first_name": rng.choice(NAMES),
        "family_name": rng.choice(FAMILY_NAMES),
        "age_in_years": str(rng.randint(1, 99)),
        "favourite_colour": rng.choice(("red", "green", "blue", "yellow")),
        "number_of_children": str(rng.randint(0, 9)),
        "is_married": rng.choice(("true", "false")),
    }
    assert values.keys() == SCHEMA["properties"].keys()
    return values


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def rates(
    llm: LLM, prompts: Sequence[Any], params: Any, turns: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Generate without and with drafts in alternation, and return both rates."""
    scheduler = llm._engine.core.scheduler
    kinds: list[Speculation] = [NoSpeculation(), scheduler.speculation]
    measured: list[list[float]] = [[], []]
    expected: list[list[int]] = []
    for turn in range(1 + turns):  # the first one warms up
        for kind, speculation in enumerate(kinds):
            scheduler.speculation = speculation
            llm.reset_prefix_cache()
            began_at = clock()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = clock() - began_at
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            expected = expected or answers
            assert answers == expected, "drafts changed a token"
            if turn:
                measured[kind].append(sum(map(len, answers)) / seconds)
    return statistics.median(measured[0]), statistics.median(measured[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", choices=("edit", "quote", "json"), nargs="+", default=["edit", "quote", "json"]
    )
    parser.add_argument("--config", type=json.loads, default={"method": "auto"})
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.cpu_time:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = []
    for name in args.task:
        for batch in args.batch:
            with LLM(num_blocks=150 + 100 * batch, speculative_config=args.config) as llm:
                if args.cpu_time:
                    llm._engine.core.clock = clock
                none, drafted = rates(llm, *requests(llm, name, batch), args.turns, clock)
                stats = llm.stats()
                accepted = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
                rows.append((name, batch, none, drafted, drafted / none, stats.num_draft_tokens, accepted))
    header = ("task", "requests", "tok/s without", "with drafts", "ratio", "drafted", "accepted")
    data = {"benchmark": "drafters", "rows": [dict(zip(header, row, strict=True)) for row in rows]}
    show(f"built-in model, {json.dumps(args.config)}", header, rows, args.json, data)


if __name__ == "__main__":
    main()
