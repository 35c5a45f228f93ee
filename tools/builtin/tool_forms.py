"""Tools that fill in a form: one to four parameters, some of them optional, whose values the question names.

Whether `7` is a number or a string is only told by the schema.
"""

from random import Random
from typing import Any

from tools.builtin import tool_values
from tools.builtin.cast import invented_word
from tools.builtin.chat_format import Call
from tools.builtin.grammar import a, capital
from tools.builtin.tool_names import Naming, joined, made_up, name_words, verbs
from tools.builtin.tool_results import Outcome, json_text
from tools.builtin.tool_tasks import Task, typed
from tools.builtin.toolbox import TaughtTool, ToolParameter

_TYPES = ("string", "string", "string", "integer", "integer", "number")


def form_tool(rng: Random, naming: Naming, held_out: bool) -> TaughtTool:
    """`create_event(title, day, guests)`"""
    opaque = naming == "made up"
    verb = rng.choice(verbs())
    noun = invented_word(rng) if opaque or rng.random() < 0.3 else rng.choice(name_words(held_out))
    fields: list[str] = []
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        invented = rng.random() < (0.9 if opaque else 0.2)
        words = [invented_word(rng) if invented else rng.choice(name_words(held_out))]
        if rng.random() < 0.2:
            words.append(rng.choice(name_words(held_out)))
        field = "_".join(words)
        if field not in fields and noun not in words:
            fields.append(field)
    parameters = [
        ToolParameter(
            field, rng.choice(_TYPES), rng.choice(("", "", f"The {_spoken(field)}.")), rng.random() < 0.7
        )
        for field in fields or ["value"]
    ]
    parameters[0] = ToolParameter(parameters[0].name, parameters[0].type, parameters[0].about)
    name = made_up(rng) if opaque and rng.random() < 0.5 else joined(rng, [verb, noun])
    describe = rng.choice((f"{capital(verb)} {a(noun)}.", f"Use this to {verb} {a(noun)}.", f"{verb} {noun}"))
    return TaughtTool("form", name, describe, tuple(parameters), f"{verb} {noun}", opaque=True)


def _spoken(field: str) -> str:
    return field.replace("_", " ")


def _value(rng: Random, kind: str, held_out: bool) -> str:
    if kind == "number" and rng.random() < 0.4:
        return f"{rng.randint(0, 99)}.{rng.randint(1, 9)}"
    if kind != "string" or rng.random() < 0.25:
        return str(int(tool_values.number(rng, held_out)))
    return rng.choice((tool_values.city, tool_values.name, tool_values.some_words, tool_values.symbol))(
        rng, held_out
    )


def form_task(rng: Random, tool: TaughtTool, held_out: bool) -> Task:
    """The values come in any order; what is optional may be missing."""
    verb, noun = tool.noun.split(" ")
    given = {
        one.name: (_value(rng, one.type, held_out), one.type)
        for one in tool.parameters
        if one.required or rng.random() < 0.5
    }
    parts = [f"{_spoken(name)} {value}" for name, (value, _) in given.items()]
    if rng.random() < 0.5:
        rng.shuffle(parts)
    listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    do = f"{verb} {a(noun)} with {listed}"
    question = rng.choice(
        (
            f"{capital(do)}.",
            f"Please {do}.",
            f"Can you {do}?",
            f"I want to {do}.",
            f"{capital(verb)} {noun}: {listed}",
        )
    )
    if rng.random() < 0.15:
        question = f"Call {tool.name} with {listed}."
    arguments: dict[str, Any] = {name: typed(value, kind) for name, (value, kind) in given.items()}
    return Task(question, "", do, Call(tool.name, arguments), _outcome(rng, noun))


def _outcome(rng: Random, noun: str) -> Outcome:
    number = str(rng.randint(1, 9_999))
    if rng.random() < 0.4:
        record: dict[str, Any] = (
            {"id": int(number)} if rng.random() < 0.5 else {"status": "ok", "id": int(number)}
        )
        return Outcome(json_text(rng, record), f"The {noun} has the id {number}.", (number,))
    text = rng.choice(
        ("ok", "done", f"{noun} {number}", f"saved as {number}", f"{invented_word(rng)}", number)
    )
    return Outcome(text, f"The {noun}: {text}.", (text,))
