"""Small rules of English that every text kind uses: articles, plurals, capitals, lists and numbers."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

_SOUNDS_LIKE_A_CONSONANT = ("uni", "use", "usu", "eu", "one", "once", "ukulele")
_SOUNDS_LIKE_A_VOWEL = ("hour", "honest", "heir", "8", "11", "18")
_IRREGULAR_PLURALS = {
    "mouse": "mice",
    "goose": "geese",
    "sheep": "sheep",
    "fish": "fish",
    "deer": "deer",
    "wolf": "wolves",
    "calf": "calves",
    "child": "children",
    "man": "men",
    "woman": "women",
    "foot": "feet",
    "tooth": "teeth",
    "leaf": "leaves",
    "loaf": "loaves",
    "knife": "knives",
    "shelf": "shelves",
    "scarf": "scarves",
    "tomato": "tomatoes",
    "potato": "potatoes",
    "ox": "oxen",
    "fisherman": "fishermen",
    "moose": "moose",
    "thief": "thieves",
    "hero": "heroes",
    "volcano": "volcanoes",
    "echo": "echoes",
    "dice": "dice",
    "person": "people",
}
_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def article(phrase: str) -> str:
    """`a` or `an`, by the sound that the phrase starts with."""
    start = phrase.lower()
    if start.startswith(_SOUNDS_LIKE_A_CONSONANT):
        return "a"
    if start.startswith(_SOUNDS_LIKE_A_VOWEL) or start[:1] in "aeiou":
        return "an"
    return "a"


def a(phrase: str) -> str:
    """The phrase behind its indefinite article: `an old oak`."""
    return f"{article(phrase)} {phrase}"


def plural(noun: str) -> str:
    """The plural of a noun, or of a phrase that ends in one."""
    head, space, last = noun.rpartition(" ")
    if last in _IRREGULAR_PLURALS:
        return head + space + _IRREGULAR_PLURALS[last]
    if last.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if last.endswith("y") and last[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def capital(text: str) -> str:
    """The text with its first letter as a capital, the rest untouched."""
    return text[:1].upper() + text[1:]


def join(items: Sequence[str], word: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {word} {items[-1]}"


def number(n: int) -> str:
    """A whole number from 0 to 100 in words."""
    if n < 20:
        return _SMALL[n]
    if n == 100:
        return "one hundred"
    tens, ones = divmod(n, 10)
    return _TENS[tens] + (f"-{_SMALL[ones]}" if ones else "")


def say(rng: Random, options: Sequence[str], words: Mapping[str, str]) -> str:
    """One of the templates, filled in, with a capital at its start."""
    return capital(rng.choice(options).format_map(words))


def pick_other(rng: Random, options: Sequence[T], *taken: T) -> T:
    """A random option that is not among those taken."""
    while True:
        option = rng.choice(options)
        if option not in taken:
            return option
