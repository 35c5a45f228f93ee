"""Words that mean the same, name a kind of thing or belong together: the query says one, the answer another."""

from functools import cache
from random import Random

from tools.builtin.tables import rows
from tools.rerankers.ranked import Draft
from tools.rerankers.wording import DATA, Side, fill, frames, pair, trained

Words = tuple[str, ...]


def _items(line: str) -> Words:
    return tuple(item.strip() for item in line.split(","))


@cache
def synonyms() -> dict[str, tuple[Words, ...]]:
    """The groups of words of one meaning, for things (n), actions (v) and properties (a)."""
    found: dict[str, list[Words]] = {"n": [], "v": [], "a": []}
    for kind, line in rows("synonyms", DATA):
        found[kind].append(_items(line))
    return {kind: tuple(groups) for kind, groups in found.items()}


@cache
def _groups() -> tuple[tuple[str, str, Words], ...]:
    """(`bird`, `birds`, its members)"""
    found = []
    for names, members in rows("groups", DATA):
        one, many = _items(names)
        found.append((one, many, _items(members)))
    return tuple(found)


@cache
def _fields() -> tuple[tuple[str, Words], ...]:
    return tuple((field, _items(words)) for field, words in rows("fields", DATA))


def phrase(rng: Random, side: Side) -> Draft | None:
    """`buy a cheap car`, answered by a sentence with other words of the same meaning."""
    if side is Side.NAMES:
        return None
    templates = pair(rng, frames("phrase", "ask"), frames("phrase", "say"), side)
    if templates is None:
        return None
    groups = {kind: rng.choice(found) for kind, found in synonyms().items()}
    asked = {kind: rng.choice(group) for kind, group in groups.items()}
    same = {kind: rng.choice(group) if rng.random() < 0.75 else asked[kind] for kind, group in groups.items()}
    used = [kind for kind in groups if f"{{{kind}}}" in templates[0]]
    query = fill(rng, templates[0], asked)
    wrong = []
    # Each wrong text has one of the asked meanings exchanged; the words that stay are the query's own.
    for _ in range(3):
        other = dict(asked)
        for kind in rng.sample(used, 1 if rng.random() < 0.7 else len(used)):
            group = rng.choice(synonyms()[kind])
            other[kind] = rng.choice(group) if group != groups[kind] else "other"
        wrong.append(fill(rng, trained(rng, frames("phrase", "say")), other))
    return Draft(f"phrase {query}", query, fill(rng, templates[1], same), tuple(wrong))


def group(rng: Random, side: Side) -> Draft | None:
    """`birds`, answered by a sentence about an owl."""
    if side is Side.NAMES:
        return None
    templates = pair(rng, frames("group", "ask"), frames("group", "say"), side)
    if templates is None:
        return None
    one, many, members = rng.choice(_groups())
    query = fill(rng, templates[0], {"g": one, "gs": many})
    others = [o for o in rng.sample(_groups(), 6) if not set(o[2]) & {*members, one} and o[0] not in members][
        :3
    ]
    far = tuple(fill(rng, trained(rng, frames("group", "say")), _three(rng, other[2])) for other in others)
    return Draft(f"group {one}", query, fill(rng, templates[1], _three(rng, members)), (), far)


def _three(rng: Random, members: Words) -> dict[str, str]:
    return dict(zip(("m", "m2", "m3"), rng.sample(members, 3), strict=True))


def field(rng: Random, side: Side) -> Draft | None:
    """`bank and loan`, answered by a sentence about interest and savings."""
    if side is Side.NAMES:
        return None
    templates = pair(rng, frames("field", "ask"), frames("field", "say"), side)
    if templates is None:
        return None
    title, words = rng.choice(_fields())
    w, w2, *rest = rng.sample(words, 5)
    query = fill(rng, templates[0], {"field": title, "w": w, "w2": w2})
    if rng.random() < 0.3:
        rest[0] = w  # at times a word comes back
    others = [other for other in rng.sample(_fields(), 6) if not set(other[1]) & set(words)][:3]
    far = tuple(fill(rng, trained(rng, frames("field", "say")), _of_field(rng, other[1])) for other in others)
    answer = fill(rng, templates[1], dict(zip(("w", "w2", "w3"), rest, strict=True)))
    return Draft(f"field {title}", query, answer, (), far)


def _of_field(rng: Random, words: Words) -> dict[str, str]:
    return dict(zip(("w", "w2", "w3"), rng.sample(words, 3), strict=True))
