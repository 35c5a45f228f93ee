"""Facts about one thing: invented ones (schemas.txt) and those that the chat model knows (known.txt).

A question asks for one attribute. The same attribute of another thing, and other attributes of the same thing, share
its words and do not answer it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random

from tools.builtin import lexicon, things
from tools.builtin.grammar import a, number, plural
from tools.builtin.tables import rows, sections
from tools.rerankers.ranked import Draft
from tools.rerankers.wording import DATA, Side, fill, lists, name, pair, similar_name, trained, ways

Values = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Schema:
    """A kind of thing: how its attributes are asked for and told."""

    kind: str
    names: tuple[str, ...]
    asks: dict[str, tuple[str, ...]]
    says: dict[str, tuple[str, ...]]

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(self.asks)


@cache
def schemas(table: str) -> tuple[Schema, ...]:
    """The kinds in one of the two tables."""
    found = []
    for kind, keys in sections(table, DATA).items():
        asks = {key[:-1]: ways(lines) for key, lines in keys.items() if key.endswith("?")}
        says = {key[:-1]: ways(lines) for key, lines in keys.items() if key.endswith("!")}
        found.append(Schema(kind, ways(keys.get("name", ())), asks, says))
    return tuple(found)


@cache
def _known(kind: str) -> tuple[Values, ...]:
    """The records of the chat model's tables, as values of templates."""
    if kind == "animal":
        return tuple(
            {
                "one": a(animal.noun),
                "many": plural(animal.noun),
                "noun": animal.noun,
                "food": animal.food,
                "home": animal.home,
                "young": animal.young,
                "body": animal.body,
                "can": animal.can,
                "legs": number(animal.legs) if animal.legs else "no",
            }
            for animal in lexicon.ANIMALS
        )
    if kind == "job":
        return tuple(
            {
                "one": a(job.noun),
                "many": plural(job.noun),
                **{key: getattr(job, key) for key in ("does", "place", "tools")},
            }
            | {"helps": job.helps}
            for job in lexicon.JOBS
        )
    if kind == "country":
        return tuple({"country": country, "city": city} for country, city in rows("capitals"))
    return tuple(
        {"one": a(noun), "noun": noun, "meaning": meaning} for noun, meaning in things.THINGS.items()
    )


def _named(rng: Random, schema: Schema, own: str) -> Values:
    return {"x": fill(rng, rng.choice(schema.names), {"inv": own}), "low": own.lower()}


def statement(rng: Random) -> str:
    """A random sentence about an invented thing."""
    schema = rng.choice(schemas("schemas"))
    return fill(rng, trained(rng, schema.says[rng.choice(schema.attributes)]), _named(rng, schema, name(rng)))


def _draft(rng: Random, schema: Schema, values: Values, others: list[Values], side: Side) -> Draft | None:
    attribute = rng.choice(schema.attributes)
    templates = pair(rng, schema.asks[attribute], schema.says[attribute], side)
    if templates is None:
        return None
    rest = [key for key in schema.attributes if key != attribute]
    near = tuple(fill(rng, trained(rng, schema.says[key]), values) for key in rest)
    far = [fill(rng, trained(rng, schema.says[attribute]), other) for other in others]
    far.append(fill(rng, trained(rng, schema.says[rng.choice(rest)]), others[0]))
    query, answer = fill(rng, templates[0], values), fill(rng, templates[1], values)
    return Draft(f"{schema.kind} {attribute} {query}", query, answer, near, tuple(far), near)


def invented(rng: Random, side: Side) -> Draft | None:
    """`How tall is Mount Drobin?`"""
    schema, own = rng.choice(schemas("schemas")), name(rng, held_out=side is not Side.TRAIN)
    others = [
        _named(rng, schema, similar_name(rng, own) if rng.random() < 0.3 else name(rng)) for _ in range(2)
    ]
    values = _named(rng, schema, own)
    if rng.random() < 0.85:
        return _draft(rng, schema, values, others, side)
    # The name alone: everything about it is an answer, so nothing is near.
    about = [fill(rng, trained(rng, schema.says[key]), values) for key in schema.attributes]
    far = tuple(
        fill(rng, trained(rng, schema.says[rng.choice(schema.attributes)]), other) for other in others
    )
    return Draft(f"{schema.kind} {own}", values["x"], rng.choice(about), (), far, tuple(about))


def known(rng: Random, side: Side) -> Draft | None:
    """`What do owls eat?`; what is known by heart has no new names."""
    if side is Side.NAMES:
        return None
    schema = rng.choice(schemas("known"))
    own, *others = rng.sample(_known(schema.kind), 4)
    return _draft(rng, schema, _with_food(rng, own), [_with_food(rng, o) for o in others], side)


def _with_food(rng: Random, values: Values) -> Values:
    return dict(values) | {"eat": rng.choice(lists()["food"])}
