"""Names of tools and parameters: those that all clients use, natural ones of many kinds, and made-up ones.

Only the schema in the prompt tells a made-up name, its type and what it is for, so the model has to read it.
"""

from dataclasses import replace
from functools import cache
from random import Random
from typing import Literal
from zlib import crc32

from tools.builtin.cast import invented_word
from tools.builtin.grammar import capital
from tools.builtin.tables import sections
from tools.builtin.tool_results import FAMILIES
from tools.builtin.toolbox import TaughtTool, ToolParameter

Naming = Literal["common", "varied", "made up"]
SUM_FAMILIES = ("add", "subtract", "multiply", "divide", "calculator", "chooser")
_HELD_OUT_ONE_IN = 8
_BEFORE = ("the", "my", "input", "user", "target", "given", "p", "arg", "new", "which")
_AFTER = ("name", "value", "id", "str", "text", "param", "input", "field", "1", "key")
_COMMON_SUMS = {"calculator": ("calculate", "calculator"), "chooser": ("calculate",)}


@cache
def name_words(held_out: bool) -> tuple[str, ...]:
    """Words of names; one in eight is never trained on."""
    found = " ".join(sections("names")["words"]["words"]).split(",")
    stripped = [word.strip() for word in found if word.strip()]
    return tuple(word for word in stripped if (crc32(word.encode()) % _HELD_OUT_ONE_IN == 0) == held_out)


@cache
def verbs() -> tuple[str, ...]:
    return tuple(word.strip() for word in " ".join(sections("names")["words"]["verbs"]).split(","))


def joined(rng: Random, words: list[str]) -> str:
    """An identifier of these words, in one of the styles there are."""
    roll = rng.random()
    if roll < 0.6 or len(words) == 1:
        return "_".join(words)
    if roll < 0.85:
        return words[0] + "".join(map(capital, words[1:]))
    return "".join(map(capital, words)) if roll < 0.95 else "-".join(words)


def made_up(rng: Random, most: int = 3) -> str:
    """A name that says nothing."""
    return joined(rng, [invented_word(rng) for _ in range(rng.choice((1, 1, 2, most)))])


def natural(rng: Random, held_out: bool) -> str:
    """A name out of words, which need not fit."""
    return joined(rng, rng.sample(name_words(held_out), rng.choice((1, 1, 2))))


def _varied(rng: Random, name: str, held_out: bool) -> str:
    roll = rng.random()
    if roll < 0.45:
        return name
    if roll < 0.6:
        return joined(rng, [rng.choice(_BEFORE), name])
    if roll < 0.75:
        return joined(rng, [name, rng.choice(_AFTER)])
    return natural(rng, held_out)


def _explained(parameter: ToolParameter, family: str, index: int) -> str:
    """What the parameter is for: two of a made-up tool can only be told apart by that."""
    lists = FAMILIES.get(family, {})
    about = lists.get("about second" if index else "about", ("",))[0]
    return parameter.about or about


def _unlike(names: list[str]) -> bool:
    return len(set(names)) == len(names)


def _common(rng: Random, tool: TaughtTool) -> TaughtTool:
    """`get_weather(city)`, `multiply(a, b)`: as it stands in the examples of every client."""
    first, *others = tool.parameters or (None,)
    if tool.family in SUM_FAMILIES:
        name = rng.choice(_COMMON_SUMS.get(tool.family, (tool.family,)))
        letters = iter(("a", "b"))
        names = ["expression"] if tool.family == "calculator" else []
        names = names or ["operation" if one.options else next(letters) for one in tool.parameters]
        parameters = [replace(one, name=name) for one, name in zip(tool.parameters, names, strict=True)]
        return replace(tool, name=name, parameters=tuple(parameters))
    lists = FAMILIES.get(tool.family, {})
    if "name common" not in lists or first is None:
        return tool
    first = replace(first, name=rng.choice(lists["parameter common"]))
    return replace(tool, name=rng.choice(lists["name common"]), parameters=(first, *others))


def renamed(rng: Random, tool: TaughtTool, naming: Naming, held_out: bool) -> TaughtTool:
    """The tool under a name of this kind, and its parameters too."""
    if naming == "common":
        return _common(rng, tool)
    while True:
        if naming == "made up":
            names = [made_up(rng, 2) for _ in tool.parameters]
        elif tool.family in SUM_FAMILIES and rng.random() < 0.5:
            names = [one.name for one in tool.parameters]
        else:
            names = [_varied(rng, one.name, held_out) for one in tool.parameters]
        if _unlike(names):
            break
    opaque = naming == "made up"
    parameters = tuple(
        replace(one, name=name, about=_explained(one, tool.family, index) if opaque else one.about)
        for index, (one, name) in enumerate(zip(tool.parameters, names, strict=True))
    )
    name = made_up(rng) if opaque else tool.name
    return replace(tool, name=name, parameters=parameters, opaque=opaque)
