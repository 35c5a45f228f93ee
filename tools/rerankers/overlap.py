"""Finding a text by its own words: what is left to go by where nothing was taught.

The texts are prose from the project's documentation and from the corpus of the chat model. A query takes some words
from one of them; the words that few texts have count the most.
"""

import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from random import Random
from zlib import crc32

from tools.builtin.corpus import documents
from tools.rerankers.ranked import Draft
from tools.rerankers.wording import Side, content_words

_PAGES = (
    "architecture",
    "continuous-batching",
    "request-walk",
    "deploy",
    "security",
    "server",
    "performance",
)
_CHAT_DOCUMENTS = 2_500
_HELD_OUT_ONE_IN = 10
_MARKUP = re.compile(r"\[([^\]]*)\]\([^)]*\)|[*`_#>|]")
_END = re.compile(r"(?<=[.!?:])\s+")


def _page_sentences(text: str) -> list[str]:
    """The sentences of a page, without its code and tables."""
    found = []
    for block in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n"):
        if block.startswith(("    ", "|", "#", "!")):
            continue
        found += _END.split(_MARKUP.sub(r"\1", " ".join(block.split())))
    return found


@cache
def sentences() -> tuple[str, ...]:
    """All prose, in sentences of at least four words."""
    docs = Path(__file__).parents[2] / "docs"
    found = [
        sentence for page in _PAGES for sentence in _page_sentences((docs / f"{page}.md").read_text("utf-8"))
    ]
    for example in documents(0, 0, _CHAT_DOCUMENTS):
        found += _END.split(" ".join(example.turns[-1].split()))
    return tuple(dict.fromkeys(sentence for sentence in found if 4 <= len(sentence.split()) <= 40))


@cache
def _words() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(content_words(sentence)) for sentence in sentences())


@cache
def _places() -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, words in enumerate(_words()):
        for word in words:
            found[word].append(index)
    return {word: tuple(places) for word, places in found.items()}


def _held_out(sentence: str) -> bool:
    return crc32(sentence.encode()) % _HELD_OUT_ONE_IN == 0


@cache
def _trained() -> tuple[str, ...]:
    return tuple(sentence for sentence in sentences() if not _held_out(sentence))


def statement(rng: Random) -> str:
    """Any sentence that is not held out."""
    return rng.choice(_trained())


def _query(rng: Random, index: int) -> str:
    """Some words of the sentence, the rare ones first; or a few that follow each other."""
    words = list(_words()[index])
    if rng.random() < 0.3:
        whole = sentences()[index].split()
        start = rng.randrange(max(1, len(whole) - 4))
        return " ".join(whole[start : start + rng.randint(3, 6)])
    weights = [len(_places()[word]) ** -0.5 * rng.random() for word in words]
    best = [word for _, word in sorted(zip(weights, words, strict=True), reverse=True)]
    chosen = best[: rng.randint(2, 5)]
    rng.shuffle(chosen)
    return " ".join(chosen)


def keywords(rng: Random, side: Side) -> Draft | None:
    """`batch scheduler every step`, answered by the sentence that it was taken from."""
    index = rng.randrange(len(sentences()))
    if side is Side.NAMES or len(_words()[index]) < 3:
        return None
    answer = sentences()[index]
    if _held_out(answer) != (side is Side.SENTENCES):
        return None
    query = _query(rng, index)
    asked = content_words(query)
    found: Counter[int] = Counter()
    for word in asked:
        places = _places().get(word, ())
        found.update(rng.sample(places, min(4, len(places))))
    # Texts with some of the words are better than those with none, and worse than the one with all of them.
    partly = [
        place for place, _ in found.most_common() if place != index and set(asked) - set(_words()[place])
    ]
    near = tuple(sentences()[place] for place in partly if not _held_out(sentences()[place]))
    return Draft(f"words {index}", query, answer, near[:4])
