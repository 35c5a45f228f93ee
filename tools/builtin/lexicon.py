"""The people, animals and creatures of the generated world, with what is true of each."""

from typing import NamedTuple

from tools.builtin.tables import rows, words

GIRLS = words("girls")
BOYS = words("boys")
# The parts of invented words.
ONSETS = words("onsets")
VOWELS = words("vowels")
CODAS = (*[""] * 6, *words("codas"))
# What someone does with something: "bell ringer", "boat builder".
DOERS = words("doers")


class Animal(NamedTuple):
    noun: str
    says: str  # the word for its sound, or "" where it is silent
    young: str
    home: str  # with its preposition
    food: str
    legs: int
    body: str
    can: str  # completes "it can ..."


def _animal(row: tuple[str, ...]) -> Animal:
    noun, says, young, home, food, legs, body, can = row
    return Animal(noun, says, young, home, food, int(legs), body, can)


ANIMALS = tuple(_animal(row) for row in rows("animals"))
SEA_ANIMALS = words("sea animals")
CREATURES = words("creatures")
# Heroes that the model cannot know from elsewhere: it has to take them from the prompt.
OBJECT_HEROES = words("object heroes")
FEMALE_KINDS = (
    "princess",
    "queen",
    "witch",
    "mermaid",
    "fairy",
    "hen",
    "cow",
    "grandmother",
    *words("women"),
)
MALE_KINDS = (
    "prince",
    "king",
    "wizard",
    "snowman",
    "rooster",
    "grandfather",
    "cowboy",
    "postman",
    "fisherman",
    *words("men"),
)


class Job(NamedTuple):
    noun: str
    does: str  # third person: "bakes bread"
    place: str  # with its preposition
    tools: str
    helps: str  # completes "because of {noun}s, people ..."


JOBS = tuple(Job(*row) for row in rows("jobs"))

CHARACTER_WORDS = words("character words")
