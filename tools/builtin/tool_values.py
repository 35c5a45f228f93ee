"""What the arguments and results of tools are about: cities, topics, numbers, invented words."""

from collections.abc import Callable
from functools import cache
from random import Random

from tools.builtin import lexicon
from tools.builtin.cast import invented_name, invented_word
from tools.builtin.facts import DAYS
from tools.builtin.grammar import capital
from tools.builtin.tables import sections

Words = dict[str, str]


@cache
def words(kind: str, held_out: bool = False) -> tuple[str, ...]:
    """The words of a kind that training may use, or else those that it never sees."""
    lists = sections("values")[kind]
    lines = lists.get("held out", lists["words"]) if held_out else lists["words"]
    return tuple(word.strip() for word in " ".join(lines).split(",") if word.strip())


def city(rng: Random, held_out: bool) -> str:
    """A city, real or invented: the model is to copy it, whatever it is."""
    roll = rng.random()
    if roll < 0.45:
        name = rng.choice(words("city", held_out))
    elif roll < 0.9:
        name = invented_name(rng)
    else:
        name = (
            f"{rng.choice(('New', 'San', 'Port', 'Old', 'Saint', invented_name(rng)))} {invented_name(rng)}"
        )
    roll = rng.random()
    if roll < 0.08:
        return f"{name}, {rng.choice(words('country'))}"
    return name.lower() if roll < 0.13 else name


def zone(rng: Random, held_out: bool) -> str:
    return rng.choice(words("zone", held_out)) if rng.random() < 0.2 else city(rng, held_out)


def topic(rng: Random, held_out: bool) -> str:
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(words("topic", held_out))
    if roll < 0.65:
        return invented_word(rng)
    if roll < 0.85:
        return " ".join(invented_name(rng) for _ in range(rng.choice((1, 2, 2))))
    return f"the {invented_word(rng)} {rng.choice(('of', 'in'))} {city(rng, held_out)}"


def symbol(rng: Random, _held_out: bool) -> str:
    if rng.random() < 0.3:
        return invented_name(rng)
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((3, 4, 4))))


def name(rng: Random, _held_out: bool) -> str:
    first = rng.choice((*lexicon.GIRLS, *lexicon.BOYS)) if rng.random() < 0.4 else invented_name(rng)
    return f"{first} {invented_name(rng)}" if rng.random() < 0.3 else first


def song(rng: Random, _held_out: bool) -> str:
    return " ".join(invented_name(rng) for _ in range(rng.choice((1, 2, 2, 3))))


def some_words(rng: Random, _held_out: bool) -> str:
    return " ".join(invented_word(rng) for _ in range(rng.choice((1, 1, 1, 2))))


def said(rng: Random, _held_out: bool) -> str:
    when = rng.choice((*DAYS, "tomorrow", "today", "tonight"))
    line = rng.choice(
        ("I am late", "see you {}", "the {} is here", "call me {}", "bring the {}", "happy birthday")
    )
    return line.format(when if "you" in line or "me" in line else invented_word(rng))


def entity(rng: Random, held_out: bool) -> str:
    roll = rng.random()
    if roll < 0.4:
        return invented_name(rng)
    if roll < 0.7:
        return f"the {invented_word(rng)}"
    return city(rng, held_out) if roll < 0.85 else name(rng, held_out)


def number(rng: Random, _held_out: bool) -> str:
    """A whole number, of few digits more often than of many."""
    return str(rng.randint(0, 10 ** rng.choice((1, 2, 2, 2, 3, 3, 4, 5)) - 1))


def language(rng: Random, held_out: bool) -> str:
    return rng.choice(words("language", held_out)) if rng.random() < 0.8 else invented_name(rng)


VALUES: dict[str, Callable[[Random, bool], str]] = {
    "weather": city,
    "time": zone,
    "lookup": topic,
    "population": city,
    "stock": symbol,
    "translate": some_words,
    "distance": city,
    "timer": number,
    "order": number,
    "play": song,
    "message": name,
    "attribute": entity,
}
SECOND_VALUES: dict[str, Callable[[Random, bool], str]] = {
    "translate": language,
    "distance": city,
    "message": said,
}


def result_words(rng: Random) -> Words:
    """What the templates of results can name."""
    price = f"{rng.randint(1, 999)}.{rng.randint(0, 99):02}"
    return {
        "condition": rng.choice(words("condition")) if rng.random() < 0.7 else invented_word(rng),
        "n": str(rng.randint(-15, 42)) + (f".{rng.randint(1, 9)}" if rng.random() < 0.12 else ""),
        "m": str(rng.randint(0, 99)),
        "d": str(rng.randint(1, 9)),
        "h": str(rng.randint(0, 23)),
        "mm": f"{rng.randint(0, 59):02}",
        "clock": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
        "weekday": rng.choice(DAYS),
        "big": f"{rng.randint(1_000, 9_999_999):,}"
        if rng.random() < 0.4
        else str(rng.randint(100, 9_999_999)),
        "price": price,
        "sentence": rng.choice(words("sentence")) if rng.random() < 0.4 else some_claim(rng),
        "invented": invented_word(rng),
        "long": ". ".join(capital(some_claim(rng)) for _ in range(rng.choice((2, 2, 3, 4)))),
    }


def some_claim(rng: Random) -> str:
    """A claim that the model cannot know, as a lookup would return it."""
    claim = rng.choice(
        (
            "it was found in {city} in {year}",
            "it has {n} {thing}s",
            "{name} described it in {year}",
            "it is {n} meters high and made of {thing}",
            "the {thing} was named after {name}",
            "it comes from {city}",
        )
    )
    return claim.format(
        city=city(rng, False),
        year=rng.randint(1200, 2026),
        n=rng.randint(2, 900),
        thing=invented_word(rng),
        name=invented_name(rng),
    )
