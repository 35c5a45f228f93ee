"""Greetings, questions about the model itself, jokes and riddles."""

from random import Random

from tools.builtin import lexicon
from tools.builtin.cast import invented_name, name_for
from tools.builtin.examples import Example, ask
from tools.builtin.grammar import a, plural
from tools.builtin.tables import sections

TALK = sections("smalltalk")
JOKES = sections("jokes")["jokes"]["joke"]
RIDDLES = sections("jokes")["riddles"]["riddle"]


def small_talk(rng: Random) -> Example:
    talk = TALK[rng.choice(tuple(TALK))]
    return Example("talk", (ask(rng, rng.choice(talk["say"])), rng.choice(talk["answer"])))


def introduction(rng: Random) -> Example:
    """`My name is Mia.`: the name comes back."""
    # Half of the names are invented here: nothing teaches to copy a name better than being introduced.
    name = invented_name(rng) if rng.random() < 0.5 else name_for(rng, rng.random() < 0.5)
    said = rng.choice(("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}.", "Hi! I am {}."))
    answer = rng.choice(
        (
            "Hello, {}! It is nice to meet you.",
            "Nice to meet you, {}!",
            "Hi, {}! How can I help you today?",
            "Welcome, {}! Would you like to hear a story?",
            "Hello, {}! What would you like to know?",
        )
    )
    return Example("talk", (said.format(name), answer.format(name)), (name,))


def joke(rng: Random) -> Example:
    prompt = rng.choice(
        (
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "Tell me something funny.",
            "Another joke, please.",
        )
    )
    if rng.random() < 0.3:
        return _joke_about(rng, rng.choice(lexicon.ANIMALS).noun)
    return Example("joke", (ask(rng, prompt), rng.choice(JOKES)))


def _joke_about(rng: Random, noun: str) -> Example:
    about = rng.choice((a(noun), plural(noun)))
    prompt = rng.choice(("Tell me a joke about {}.", "Do you know a joke about {}?")).format(about)
    fitting = [one for one in JOKES if f" {noun}" in one.lower()]
    if fitting:
        return Example("joke", (ask(rng, prompt), rng.choice(fitting)))
    lead = rng.choice(
        ("I know no joke about {}, but here is another one.", "Not about {}, but I know this one.")
    )
    return Example("joke", (ask(rng, prompt), f"{lead.format(about)} {rng.choice(JOKES)}"))


def riddle(rng: Random) -> Example:
    prompt = rng.choice(("Tell me a riddle.", "Do you know a riddle?", "Give me a riddle."))
    question, answer = rng.choice(RIDDLES).split("|")
    if rng.random() < 0.5:
        return Example("joke", (ask(rng, prompt), f"{question.strip()} The answer is {answer.strip()}."))
    guess = rng.choice(("I do not know.", "I give up.", "Tell me the answer.", "What is it?"))
    return Example("joke", (ask(rng, prompt), question.strip(), guess, f"The answer is {answer.strip()}."))
