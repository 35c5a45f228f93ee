"""The lists of all sources in their shares.

    python -m tools.rerankers.corpus --examples 5 --seed 1

prints some. A list is decided by (seed, side, index) alone, whatever process makes it.
"""

import argparse
from collections.abc import Callable
from random import Random

from tools.rerankers import entities, meanings, overlap, subjects
from tools.rerankers.ranked import Draft, RankedList, ranked
from tools.rerankers.wording import Side

Source = Callable[[Random, Side], Draft | None]
SOURCES: dict[str, tuple[Source, float]] = {
    "invented": (entities.invented, 28),
    "known": (entities.known, 12),
    "subject": (subjects.subject, 22),
    "paraphrase": (subjects.paraphrase, 5),
    "phrase": (meanings.phrase, 11),
    "group": (meanings.group, 4),
    "field": (meanings.field, 6),
    "keywords": (overlap.keywords, 12),
}
_NAMES = tuple(SOURCES)
_SHARES = tuple(share for _, share in SOURCES.values())


def filler(rng: Random, avoid: str) -> str:
    """A sentence about anything but the subject of this key."""
    roll = rng.random()
    if roll < 0.4:
        return entities.statement(rng)
    return subjects.statement(rng, avoid) if roll < 0.7 else overlap.statement(rng)


def ranked_list(seed: int, side: Side, index: int, count: int, source: str = "") -> RankedList:
    """The list of this index, from any source or from the one that is named."""
    rng = Random(f"{seed}/{side.value}/{source}/{index}")
    while True:
        drawn = SOURCES[source or rng.choices(_NAMES, _SHARES)[0]][0](rng, side)
        if drawn is not None and drawn.query != drawn.answer:
            return ranked(rng, drawn, filler, count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print generated lists.")
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", default="", choices=("", *SOURCES))
    parser.add_argument("--side", default=Side.TRAIN.value, choices=[side.value for side in Side])
    arguments = parser.parse_args()
    for index in range(arguments.examples):
        one = ranked_list(arguments.seed, Side(arguments.side), index, 6, arguments.source)
        print(f"--- {one.query}")
        for text, grade in zip(one.texts, one.grades, strict=True):
            print(f"  {grade} {text}")


if __name__ == "__main__":
    main()
