"""Filling templates, and which templates and names are held out: the words under all generated lists."""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from random import Random
from zlib import crc32

from tools.builtin import lexicon
from tools.builtin.cast import invented_name
from tools.builtin.grammar import a, capital
from tools.builtin.tables import rows, sections

DATA = Path(__file__).parent / "data"
_BRACES = re.compile(r"\{(\w+)(?::(\d+)-(\d+))?\}")
_WORDS = re.compile(r"[a-z0-9']+")
_TEMPLATES_HELD_OUT_ONE_IN = 7
_NAMES_HELD_OUT_ONE_IN = 10


class Side(Enum):
    """What a list is for: training, or a test with names or with sentences that training never shows."""

    TRAIN = "train"
    NAMES = "new names"
    SENTENCES = "new sentences"


@cache
def _split(templates: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The templates to train on, and those held out; a list of one or two is always trained on."""
    held = tuple(t for t in templates if crc32(t.encode()) % _TEMPLATES_HELD_OUT_ONE_IN == 0)
    kept = tuple(t for t in templates if t not in held)
    return (kept, held) if len(kept) >= 2 else (templates, ())


def pair(rng: Random, asks: tuple[str, ...], says: tuple[str, ...], side: Side) -> tuple[str, str] | None:
    """A question template and an answer template; for `SENTENCES` at least one of them is held out."""
    (asks, new_asks), (says, new_says) = _split(asks), _split(says)
    if side is not Side.SENTENCES:
        return rng.choice(asks), rng.choice(says)
    choices = [
        (left, right)
        for left, right in ((new_asks, says), (asks, new_says), (new_asks, new_says))
        if left and right
    ]
    if not choices:
        return None
    left, right = rng.choice(choices)
    return rng.choice(left), rng.choice(right)


def kept(templates: tuple[str, ...]) -> tuple[str, ...]:
    """The templates that are not held out."""
    return _split(templates)[0]


def trained(rng: Random, templates: tuple[str, ...]) -> str:
    """One of the templates that are not held out."""
    return rng.choice(kept(templates))


def ways(lines: Sequence[str]) -> tuple[str, ...]:
    """All ways to say something, which bars separate."""
    return tuple(way.strip() for line in lines for way in line.split("|"))


@cache
def lists() -> dict[str, tuple[str, ...]]:
    """What braces draw from."""
    found = {key: tuple(item.strip() for item in items.split(",")) for key, items in rows("lists", DATA)}
    found["job"] = tuple(job.noun for job in lexicon.JOBS)
    return found


def name(rng: Random, held_out: bool = False) -> str:
    """An invented name from the side of training, or from the other one."""
    while True:
        found = invented_name(rng)
        if (crc32(found.lower().encode()) % _NAMES_HELD_OUT_ONE_IN == 0) == held_out:
            return found


def similar_name(rng: Random, other: str) -> str:
    """A name that shares its beginning with another one."""
    return other[: max(2, len(other) // 2)] + name(rng).lower()[:4]


def _value(rng: Random, key: str, low: str | None, high: str | None) -> str:
    if low is not None and high is not None:
        return str(rng.randint(int(low), int(high)))
    if key == "year":
        return str(rng.randint(1200, 2024))
    if key in ("inv", "town"):
        return name(rng)
    if key == "low":
        return name(rng).lower()
    if key in ("first", "person"):
        first = rng.choice(lexicon.GIRLS if rng.random() < 0.5 else lexicon.BOYS)
        return f"{first} {name(rng)}" if key == "person" and rng.random() < 0.6 else first
    if key == "a_job":
        return a(rng.choice(lists()["job"]))
    return rng.choice(lists()[key])


def fill(rng: Random, template: str, values: Mapping[str, str]) -> str:
    """The template with `values` in its braces, and what they do not hold drawn at random."""
    filled = _BRACES.sub(
        lambda found: values[found[1]] if found[1] in values else _value(rng, found[1], found[2], found[3]),
        template,
    )
    return capital(filled)


@cache
def _stop_words() -> frozenset[str]:
    return frozenset(lists()["stop"])


def content_words(text: str) -> list[str]:
    """The words that carry the subject, lower case, each once."""
    return list(
        dict.fromkeys(
            word for word in _WORDS.findall(text.lower()) if word not in _stop_words() and len(word) > 1
        )
    )


def frames(name: str, key: str) -> tuple[str, ...]:
    return ways(sections("frames", DATA)[name][key])


def typed(rng: Random, query: str) -> str:
    """A query as people type it: whole, without its question mark, polite, or only its content words."""
    roll = rng.random()
    if roll < 0.5:
        return query
    if roll < 0.78:
        return query.rstrip(".?!")
    if roll < 0.84:
        return f"{rng.choice(('please tell me', 'hi,', 'quick question:', 'I want to know', 'do you know'))} {query}"
    return " ".join(content_words(query)) or query
