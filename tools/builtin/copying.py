"""Short exercises in copying: to repeat words, put them into JSON and find a value by its key.

A call of a tool is mostly copying, from the schema and from the question. These teach it early in the training, at a
fraction of the tokens that a chat with tools has.
"""

import json
from random import Random

from tools.builtin import tool_values
from tools.builtin.cast import invented_word
from tools.builtin.chat_format import Turn, dumps
from tools.builtin.tool_names import made_up, natural

Exercise = list[Turn]


def _word(rng: Random) -> str:
    make = rng.choice(
        (tool_values.city, tool_values.name, tool_values.some_words, tool_values.number, tool_values.symbol)
    )
    return make(rng, False)


def _key(rng: Random) -> str:
    return made_up(rng, 2) if rng.random() < 0.6 else natural(rng, held_out=False)


def _pair(question: str, answer: str) -> Exercise:
    return [Turn("user", question), Turn("assistant", answer, skill="copy")]


def repeat(rng: Random) -> Exercise:
    words = " ".join(_word(rng) for _ in range(rng.choice((1, 1, 2, 3, 5))))
    return _pair(
        rng.choice(("Repeat: {}", "Repeat after me: {}", "Repeat this: {}", "Copy {}")).format(words), words
    )


def into_json(rng: Random) -> Exercise:
    keys = {_key(rng): _word(rng) for _ in range(rng.choice((1, 1, 2, 3)))}
    told = ", ".join(f"{key} {value}" for key, value in keys.items())
    values = {key: int(v) if v.isdigit() and str(int(v)) == v else v for key, v in keys.items()}
    return _pair(rng.choice(("As JSON: {}", "Write as JSON: {}", "{} as JSON")).format(told), dumps(values))


def find(rng: Random) -> Exercise:
    """The value of a key among others; the text is JSON, so that schemas look familiar."""
    entries = {
        _key(rng): {"type": rng.choice(("string", "number", "integer")), "title": invented_word(rng)}
        for _ in range(rng.choice((2, 3, 4)))
    }
    key = rng.choice(list(entries))
    wanted = rng.choice(("type", "title"))
    return _pair(f"{json.dumps(entries)}\nWhat is the {wanted} of {key}?", entries[key][wanted])


def keys_of(rng: Random) -> Exercise:
    """The names of the parameters, each with a value of its type."""
    kinds = {_key(rng): rng.choice(("string", "integer")) for _ in range(rng.choice((1, 2, 3)))}
    values = [
        invented_word(rng) if kind == "string" and rng.random() < 0.6 else str(rng.randint(0, 999))
        for kind in kinds.values()
    ]
    schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()}}
    filled = {
        key: value if kind == "string" else int(value) if value.isdigit() else value
        for (key, kind), value in zip(kinds.items(), values, strict=True)
    }
    return _pair(f"{json.dumps(schema)}\nFill in {', '.join(values)}.", dumps(filled))


def exercise(rng: Random) -> Exercise:
    """One to three of them in one chat."""
    makers = (repeat, into_json, into_json, find, keys_of, keys_of)
    return [turn for _ in range(rng.choice((1, 1, 2, 3))) for turn in rng.choice(makers)(rng)]
