"""The places and things of the generated world: where stories happen and what they are about."""

from typing import NamedTuple

from tools.builtin.tables import rows, words


class Place(NamedTuple):
    noun: str
    at: str  # the preposition that goes with it
    spots: tuple[str, ...]  # completes "looked ..."
    sights: tuple[str, ...]
    sounds: tuple[str, ...]
    smell: str

    @property
    def the(self) -> str:
        return f"the {self.noun}"

    @property
    def inside(self) -> str:
        return f"{self.at} the {self.noun}"


def _place(row: tuple[str, ...]) -> Place:
    noun, at, spots, sights, sounds, smell = row
    split = [tuple(item.strip() for item in part.split(";")) for part in (spots, sights, sounds)]
    return Place(noun, at, split[0], split[1], split[2], smell)


PLACES = tuple(_place(row) for row in rows("places"))
PLACE = {place.noun: place for place in PLACES}
# Where someone can live; the other places are only visited.
HOMES = tuple(
    PLACE[noun] for noun in PLACE if noun not in ("school", "library", "market", "kitchen", "workshop")
)
SEASIDE = tuple(PLACE[noun] for noun in ("beach", "island", "harbor", "lighthouse"))

THINGS: dict[str, str] = {row[0]: row[1] for row in rows("things")}
OTHER_THINGS = words("other things")
THING_NOUNS = tuple(THINGS)
THING_WORDS = words("thing words")

FOODS = words("foods")
SKILLS = words("skills")

CATEGORIES = {name: tuple(members.split(",")) for name, members in rows("categories")}
