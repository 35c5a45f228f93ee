"""System messages as agents have them: none, a sentence, or many."""

from random import Random

from tools.builtin import tool_values
from tools.builtin.cast import invented_name
from tools.builtin.facts import DAYS
from tools.builtin.tables import pick, sections

SYSTEMS = sections("systems")["systems"]


def system_prompt(rng: Random, held_out: bool, sentences: int | None = None) -> str:
    roll = rng.random()
    if sentences is None and roll < 0.2:
        return ""
    parts = [] if rng.random() < 0.1 else [pick(rng, SYSTEMS, "short", held_out)]
    if sentences is not None or roll > 0.6:
        count = sentences if sentences is not None else rng.randint(1, 12)
        lines = rng.choices(SYSTEMS["long"], k=count)
        words = {
            "weekday": rng.choice(DAYS),
            "name": invented_name(rng),
            "city": tool_values.city(rng, held_out),
            "n": rng.randint(1, 99),
        }
        parts += [line.format_map(words) for line in lines]
    return rng.choice((" ", " ", "\n", "\n- ")).join(parts)
