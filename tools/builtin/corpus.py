"""The corpus: all text kinds in their shares, split into training and held-out documents.

    python -m tools.builtin.corpus --examples 20 --seed 1

prints examples. A document is decided by (seed, index) alone, whatever process makes it. One combination of
subjects in `HELD_OUT_ONE_IN` is never trained on; the validation documents have only such combinations.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from zlib import crc32

from tools.builtin import chats, explain, facts, smalltalk, stories, unknown, writing
from tools.builtin.examples import SYSTEMS, Example
from tools.builtin.grammar import join
from tools.builtin.systems import system_prompt
from tools.builtin.tables import rows

HELD_OUT_ONE_IN = 25
_SYSTEM_SHARE = 0.1
_THINKING_SHARE = 0.06
_THOUGHTS: dict[str, str] = {row[0]: row[1] for row in rows("thoughts")}

Kind = Callable[[Random], Example]
_TOLD: tuple[Kind, ...] = (
    writing.description,
    writing.season,
    writing.poem,
    explain.why,
    explain.serving,
    explain.job,
    explain.about_animal,
    facts.meaning,
    stories.story,
)


def plain_text(rng: Random) -> Example:
    """An answer without its question, for plain text completion; a story may begin in its middle."""
    text = rng.choice(_TOLD)(rng).turns[1]
    if rng.random() < 0.3 and len(text) > 300:
        text = stories.split_story(rng, text)[1]
    return Example("plain", (text,), plain=True)


# Shares of documents, not of tokens: a story has a hundred times the tokens of a fact.
KINDS: dict[Kind, float] = {
    stories.story: 13,
    stories.story_of_thing: 8,
    stories.theme_story: 3,
    stories.free_story: 3,
    stories.chapters: 0.8,
    stories.continued_story: 3,
    stories.plain_story: 4,
    plain_text: 2.5,
    facts.fact: 5,
    facts.opposite: 2,
    facts.capital_city: 3,
    facts.animal_fact: 5,
    facts.meaning: 2.5,
    facts.after_and_before: 1.5,
    facts.arithmetic: 16,
    facts.counting: 1.5,
    facts.days_and_months: 0.7,
    facts.listing: 4,
    facts.either: 1.5,
    explain.why: 11,
    explain.serving: 9,
    explain.how_to: 6,
    explain.job: 2.5,
    explain.comparison: 3.5,
    explain.about_animal: 3,
    explain.advice: 2.5,
    writing.letter: 4,
    writing.dialogue: 3,
    writing.description: 2.5,
    writing.season: 1,
    writing.poem: 3,
    writing.diary: 1.5,
    smalltalk.small_talk: 4,
    smalltalk.introduction: 2,
    smalltalk.joke: 1.3,
    smalltalk.riddle: 0.7,
    unknown.unknown: 8,
    chats.chat: 9,
}
_KINDS, _WEIGHTS = tuple(KINDS), tuple(KINDS.values())


def is_held_out(example: Example) -> bool:
    """Whether the combination of subjects belongs to validation. A single subject is always trained on."""
    if len(example.subjects) < 2:
        return False
    return crc32("|".join(sorted(example.subjects)).encode()) % HELD_OUT_ONE_IN == 0


def thought(example: Example) -> str:
    """What the model thinks before this answer, where it is asked to think: one sentence."""
    said = _THOUGHTS.get(example.kind, _THOUGHTS["other"])
    subjects = [one for one in example.subjects if one in example.turns[0]]
    return f"{said}, about {join(subjects)}." if subjects and example.kind == "story" else f"{said}."


def document(seed: int, index: int, held_out: bool = False) -> Example:
    """The document of this index, from the training side or from the held-out one."""
    rng = Random(f"{seed}/{'held out' if held_out else 'train'}/{index}")
    while True:
        example = rng.choices(_KINDS, _WEIGHTS)[0](rng)
        if is_held_out(example) == held_out:
            break
    if not example.plain and rng.random() < _SYSTEM_SHARE:
        system = rng.choice(SYSTEMS) if rng.random() < 0.6 else system_prompt(rng, held_out=False)
        example = replace(example, system=system)
    if not example.plain and rng.random() < _THINKING_SHARE:
        example = replace(example, thought=thought(example))
    return example


def documents(seed: int, start: int, count: int, held_out: bool = False) -> Iterator[Example]:
    """`count` documents from the index `start` on."""
    return (document(seed, index, held_out) for index in range(start, start + count))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print examples of the generated corpus.")
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only this kind, for example story")
    parser.add_argument("--held-out", action="store_true", help="documents of the validation side")
    arguments = parser.parse_args()
    shown = index = 0
    while shown < arguments.examples:
        example = document(arguments.seed, index, arguments.held_out)
        index += 1
        if arguments.kind in ("", example.kind):
            print(f"--- {example.kind} {'|'.join(example.subjects)}\n{example.text}")
            shown += 1


if __name__ == "__main__":
    main()
