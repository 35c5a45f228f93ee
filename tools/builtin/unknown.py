"""Questions from outside of the model's little world, and honest answers to them.

There are far more of these than of the things that the model knows, so most are put together from parts: what
matters is that the answer says what it does not know, in the words of the question.
"""

from random import Random

from tools.builtin import lexicon, things
from tools.builtin.cast import invented_name, invented_word
from tools.builtin.examples import Example, ask
from tools.builtin.grammar import a, plural
from tools.builtin.tables import sections

_TEXT = sections("unknown")
UNKNOWN = _TEXT["unknown"]
_PARTS = {
    key: tuple(word.strip() for word in " ".join(lines).split(",")) for key, lines in _TEXT["parts"].items()
}
_OBJECTS = (*things.THING_NOUNS, *things.OTHER_THINGS, *_PARTS["object"])
_ANYTHING = (*_OBJECTS, *(animal.noun for animal in lexicon.ANIMALS), *lexicon.OBJECT_HEROES)


def _how(rng: Random) -> tuple[str, str]:
    """`How do I repair a clock?`"""
    thing = rng.choice((a, plural))(rng.choice(_OBJECTS) if rng.random() < 0.8 else invented_word(rng))
    do = f"{rng.choice(_PARTS['verb'])} {thing}"
    question = rng.choice(
        ("How do I {}?", "How can I {}?", "How do you {}?", "Tell me how to {}.", "How to {}?")
    )
    return question.format(do), f"I do not know how to {do}."


def _why(rng: Random) -> tuple[str, str]:
    """`Why do clocks tick?`, `Why is a diamond expensive?`"""
    noun = rng.choice(_ANYTHING)
    if rng.random() < 0.5:
        many, does = plural(noun), rng.choice(_PARTS["does"])
        return f"Why do {many} {does}?", f"I do not know why {many} {does}."
    quality = rng.choice(_PARTS["quality"])
    if rng.random() < 0.5:
        return f"Why are {plural(noun)} {quality}?", f"I do not know why {plural(noun)} are {quality}."
    return f"Why is {a(noun)} {quality}?", f"I do not know why {a(noun)} is {quality}."


def _what(rng: Random) -> tuple[str, str]:
    """`What is algebra?`, `What is a frulp?`"""
    subject = rng.choice(_PARTS["subject"]) if rng.random() < 0.6 else a(invented_word(rng))
    question = rng.choice(("What is {}?", "Explain {}.", "Tell me about {}.", "Can you explain {}?", "{}"))
    answer = rng.choice(
        ("I do not know what {} is.", "I have never heard of {}.", "I know nothing about {}.")
    )
    return question.format(subject), answer.format(subject)


def _who(rng: Random) -> tuple[str, str]:
    """`Who invented the radio?`"""
    did = f"{rng.choice(_PARTS['did'])} the {rng.choice(_OBJECTS)}"
    return f"Who {did}?", f"I do not know who {did}."


def _anything(rng: Random) -> tuple[str, str]:
    """`Where can I rent a harp?`: all other shapes of questions, without an answer of their own."""
    do = f"{rng.choice(_PARTS['verb'])} {a(rng.choice(_OBJECTS))}"
    words = {
        "do": do,
        "noun": rng.choice(_ANYTHING),
        "other": rng.choice(_ANYTHING),
        "does": rng.choice(_PARTS["does"]),
        "quality": rng.choice(_PARTS["quality"]),
        "subject": rng.choice(_PARTS["subject"]),
    }
    return rng.choice(UNKNOWN["shape"]).format_map(words), rng.choice(UNKNOWN["sorry"])


def _named(rng: Random) -> tuple[str, str]:
    """`Who was Drobin Kelm?`"""
    name = " ".join(invented_name(rng) for _ in range(rng.choice((1, 1, 2))))
    return rng.choice(UNKNOWN["name"]).format(name), rng.choice(UNKNOWN["no such name"]).format(name)


def _listed(rng: Random) -> tuple[str, str]:
    return rng.choice(UNKNOWN["ask"]), rng.choice(UNKNOWN["sorry"])


def unknown(rng: Random) -> Example:
    """What is outside of the little world of the model gets an honest answer."""
    question, answer = rng.choice((_how, _why, _what, _who, _named, _anything, _anything, _listed, _listed))(
        rng
    )
    if rng.random() < 0.25:
        answer = rng.choice(UNKNOWN["sorry"])
    offer = f" {rng.choice(UNKNOWN['offer'])}" if rng.random() < 0.8 else ""
    return Example("unknown", (ask(rng, question), answer + offer))
