"""Questions with answers that were written for them: questions.txt and the explanations of the chat model.

The answers mostly say it in other words than the question. What shares words with it is looked up among all other
answers.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random

from tools.builtin.tables import rows, sections
from tools.rerankers.ranked import Draft
from tools.rerankers.wording import DATA, Side, content_words, fill, frames, kept, pair, trained, ways


@dataclass(frozen=True, slots=True)
class Subject:
    """Every answer answers every question. `details` are sentences about it that are no answers alone."""

    key: str
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    details: tuple[tuple[str, ...], ...] = ()  # each with its ways to say it


def _written() -> list[Subject]:
    found: list[Subject] = []
    lines = (DATA / "questions.txt").read_text(encoding="utf-8").splitlines()
    key = ""
    asks: tuple[str, ...] = ()
    for line in lines:
        if line.startswith("== "):
            key = line[3:]
        elif line.startswith("? "):
            asks = ways([line[2:]])
        elif line.startswith("! "):
            found.append(Subject(key, asks, ways([line[2:]])))
    return found


def _explained(table: str) -> list[Subject]:
    found = []
    for key, parts in sections(table).items():
        details = tuple(ways([line]) for line in parts["more"])
        found.append(Subject(f"{table} {key}", (*parts["ask"], *parts["about"]), ways(parts["one"]), details))
    return found


def _instructions() -> list[Subject]:
    """Steps, and apart from them what is needed."""
    found = []
    for key, parts in sections("howto").items():
        steps = [ways([line]) for line in parts["step"]]
        joined = tuple(" ".join(step[way % len(step)] for step in steps[:4]) for way in (0, 1))
        late = tuple(" ".join(step[way % len(step)] for step in steps[-3:]) for way in (0, 1))
        do = parts["do"]
        asks = tuple(
            form.format(d)
            for d in do
            for form in ("How do I {}?", "how to {}", "steps to {}", "I want to {}")
        )
        needs = tuple(form.format(d) for d in do for form in ("What do I need to {}?", "things needed to {}"))
        found.append(Subject(f"howto {key}", asks, (*joined, *late), tuple(steps)))
        have = tuple(form.format(parts["need"][0]) for form in ("You need {}.", "Get {} first.", "Take {}."))
        found.append(Subject(f"howto {key} need", needs, have))
    return found


def _facts() -> list[Subject]:
    return [Subject(f"fact {question}", (question,), (sentence,)) for question, _, sentence in rows("facts")]


@cache
def subjects() -> tuple[Subject, ...]:
    return (*_written(), *_explained("topics"), *_explained("serving"), *_instructions(), *_facts())


@cache
def _by_key() -> dict[str, Subject]:
    return {subject.key: subject for subject in subjects()}


@cache
def _weights() -> tuple[float, ...]:
    """A subject counts by how many ways there are to ask and to answer; a fact has one."""
    return tuple(
        (len(subject.asks) * (len(subject.answers) + len(subject.details))) ** 0.5 for subject in subjects()
    )


@cache
def _sentences_with() -> dict[str, tuple[tuple[str, str], ...]]:
    """Where each word occurs: (key, sentence). Only what is trained on."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for subject in subjects():
        for sentence in (
            *kept(subject.answers),
            *(way for detail in subject.details for way in kept(detail)),
        ):
            for word in content_words(sentence):
                found[word].append((subject.key, sentence))
    return {word: tuple(places) for word, places in found.items()}


@lru_cache(maxsize=10_000)
def _title_words(key: str) -> frozenset[str]:
    return frozenset(content_words(key)) - {"howto", "topics", "serving", "fact", "color", "need"}


def _related(first: str, second: str) -> bool:
    """Whether two keys may be about the same: their titles share a word."""
    return not _title_words(first).isdisjoint(_title_words(second))


def sharing_words(rng: Random, query: str, key: str, count: int) -> tuple[str, ...]:
    """Sentences of other subjects with words of the query."""
    found = []
    words = content_words(query)
    rng.shuffle(words)
    for word in words:
        places = [sentence for other, sentence in _sentences_with().get(word, ()) if not _related(other, key)]
        if places:
            found.append(rng.choice(places))
    return tuple(found[:count])


def statement(rng: Random, avoid: str) -> str:
    """A sentence about some subject, except the one to avoid."""
    while True:
        subject = rng.choice(subjects())
        if not _related(subject.key, avoid):
            return trained(rng, subject.answers)


def _answer(rng: Random, subject: Subject, answer: str) -> str:
    """The answer alone, or with details behind it, or (at times) two details that say it together."""
    if not subject.details or rng.random() < 0.5:
        return answer
    if rng.random() < 0.25 and len(subject.details) > 2:
        start = rng.randrange(len(subject.details) - 1)
        return " ".join(trained(rng, detail) for detail in subject.details[start : start + 2])
    return " ".join((answer, *(trained(rng, detail) for detail in subject.details[: rng.randint(1, 3)])))


def _other_questions(rng: Random, asks: Sequence[str], not_this: str) -> tuple[str, ...]:
    return tuple(ask for ask in rng.sample(asks, len(asks)) if ask != not_this)[:1]


def subject(rng: Random, side: Side) -> Draft | None:
    """`Why is my code slow?`"""
    if side is Side.NAMES:
        return None
    one = rng.choices(subjects(), _weights())[0]
    templates = pair(rng, one.asks, one.answers, side)
    if templates is None:
        return None
    query, answer = templates
    answer = _answer(rng, one, answer) if side is Side.TRAIN else answer
    if len(query.split()) < 4 and not query.endswith("?") and rng.random() < 0.4:
        query = fill(rng, rng.choice(frames("about", "frame")), {"s": query})
    other = rng.choice(subjects())
    far = (
        *sharing_words(rng, query, one.key, 3),
        *([] if _related(other.key, one.key) else [trained(rng, other.asks)]),
    )
    return Draft(one.key, query, answer, _other_questions(rng, kept(one.asks), templates[0]), far)


def paraphrase(rng: Random, side: Side) -> Draft | None:
    """A sentence as the query, and the same said in another way."""
    if side is Side.NAMES:
        return None
    one = rng.choice([subject for subject in subjects() if subject.details])
    index = rng.randrange(len(one.details))
    if len(one.details[index]) < 2:
        return None
    query, answer = rng.sample(one.details[index], 2)
    held = sum(map(ord, min(query, answer))) % 7 == 0
    if held != (side is Side.SENTENCES):
        return None
    near = tuple(trained(rng, detail) for place, detail in enumerate(one.details) if place != index)
    return Draft(f"{one.key} {index}", query, answer, near, sharing_words(rng, query, one.key, 2))
