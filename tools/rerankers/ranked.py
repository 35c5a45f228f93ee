"""One training example: a query with texts of known relevance, and how the texts are made of sentences."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.rerankers.wording import content_words, fill, frames, typed

ANSWERS, RELATED, UNRELATED = 2, 1, 0
# Sentences around the one that counts: none, a few, many.
_SIZES = ((0, 0), (1, 3), (4, 9))
_SIZE_SHARES = (55, 30, 15)

Filler = Callable[[Random, str], str]  # a sentence about something else than the subject of this key


@dataclass(frozen=True, slots=True)
class Draft:
    """What a source says about a query, in single sentences."""

    key: str  # the subject; no filler is taken from it
    query: str
    answer: str
    near: tuple[str, ...] = ()  # about the subject, but no answer
    far: tuple[str, ...] = ()  # about another subject, with some of the same words
    around: tuple[str, ...] = ()  # what may stand around the answer and the near ones


@dataclass(frozen=True, slots=True)
class RankedList:
    """A query and its texts; the first one answers it, and no other does."""

    key: str
    query: str
    texts: tuple[str, ...]
    grades: tuple[int, ...]


def _traps(rng: Random, query: str) -> list[tuple[str, int]]:
    """Texts that repeat the words of the query and say nothing about it."""
    words = content_words(query) or ["it"]
    values = {"q": query, "w": rng.choice(words), "w2": rng.choice(words)}
    return [
        (fill(rng, rng.choice(frames("trap", "echo")), values), RELATED),
        (fill(rng, rng.choice(frames("trap", "words")), values), UNRELATED),
    ]


def _passage(rng: Random, size: int, core: str, around: tuple[str, ...], filler: Filler, key: str) -> str:
    sentences = [
        rng.choice(around) if around and rng.random() < 0.4 else filler(rng, key)
        for _ in range(rng.randint(*_SIZES[size]))
    ]
    sentences.insert(rng.randint(0, len(sentences)), core)
    return " ".join(dict.fromkeys(sentences))


def ranked(rng: Random, draft: Draft, filler: Filler, count: int) -> RankedList:
    """The draft as `count` texts of about the same length, the answer first."""
    size = rng.choices(range(len(_SIZES)), _SIZE_SHARES)[0]
    near, far = list(dict.fromkeys(draft.near)), list(dict.fromkeys(draft.far))
    rng.shuffle(near)
    rng.shuffle(far)
    near_traps = _traps(rng, draft.query)
    rng.shuffle(near_traps)
    room = count - 1
    chosen = [(text, RELATED) for text in near[: (room + 1) // 3]]
    chosen += [(text, UNRELATED) for text in far[: (room + 1) // 3]]
    chosen += near_traps[: rng.choice((0, 1, 1, 2))]
    chosen = chosen[:room]
    chosen += [(filler(rng, draft.key), UNRELATED) for _ in range(room - len(chosen))]
    texts = [_passage(rng, size, draft.answer, draft.around, filler, draft.key)]
    for text, grade in chosen:
        around = draft.around if grade == RELATED else ()
        texts.append(_passage(rng, size, text, around, filler, draft.key))
    return RankedList(
        draft.key, typed(rng, draft.query), tuple(texts), (ANSWERS, *(grade for _, grade in chosen))
    )
