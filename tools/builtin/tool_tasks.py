"""Tasks that one call of a tool solves: the tool, the question, the arguments, the result and the answer."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.builtin import tool_values
from tools.builtin.cast import invented_word
from tools.builtin.chat_format import Call
from tools.builtin.examples import ask
from tools.builtin.tables import pick
from tools.builtin.tool_results import FAMILIES, Outcome, outcome
from tools.builtin.toolbox import TaughtTool, ToolParameter

DATA_FAMILIES = tuple(FAMILIES)
_NUMBERS = ("timer", "order")
_UNITS = ("celsius", "fahrenheit")
# Nouns that have a family of their own.
_TAKEN = ("population", "distance", "temperature", "location")


@dataclass(frozen=True, slots=True)
class Task:
    """`want` completes "tell me ...", `do` is an order; one of them can be empty."""

    question: str
    want: str
    do: str
    call: Call
    outcome: Outcome
    words: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> str:
        return self.do or f"tell me {self.want}"

    @property
    def wanted(self) -> str:
        """Completes "The user wants ..."."""
        return self.want or f"me to {self.do}"


def tool_name(rng: Random, name: str) -> str:
    """The name as it is, or with what servers and people put before and after it."""
    roll = rng.random()
    if roll < 0.8:
        return name
    if roll < 0.88:
        return f"{invented_word(rng)}_{name}"
    if roll < 0.92:
        return f"mcp__{invented_word(rng)}__{name}"
    return name + rng.choice(("_tool", "_v2", "_function", "_1", f"_{invented_word(rng)}"))


def _parameter(rng: Random, family: str, key: str, about: str, held_out: bool) -> ToolParameter:
    lists = FAMILIES[family]
    kind = "string"
    if family in _NUMBERS:
        kind = rng.choice(("integer", "integer", "number", "string"))
    text = rng.choice(lists[about]) if rng.random() < 0.8 else ""
    return ToolParameter(pick(rng, lists, key, held_out), kind, text)


def data_tool(rng: Random, family: str, held_out: bool = False) -> TaughtTool:
    """A tool of one of the families in data/tools.txt."""
    lists, noun = FAMILIES[family], ""
    if family == "attribute":
        noun = rng.choice([one for one in tool_values.words("noun", held_out) if one not in _TAKEN])
    words = {"noun": noun, "noun_": noun.replace(" ", "_")}
    parameters = []
    if "parameter" in lists:
        parameters.append(_parameter(rng, family, "parameter", "about", held_out))
    if "second" in lists:
        parameters.append(_parameter(rng, family, "second", "about second", held_out))
    if family == "weather" and rng.random() < 0.25:
        unit = ToolParameter(rng.choice(("unit", "units")), "string", "", rng.random() < 0.3, _UNITS)
        parameters.append(unit)
    name = tool_name(rng, pick(rng, lists, "name", held_out).format_map(words))
    return TaughtTool(family, name, rng.choice(lists["describe"]).format_map(words), tuple(parameters), noun)


def typed(value: str, kind: str) -> Any:
    if kind == "string":
        return value
    return float(value) if "." in value else int(value)


def data_task(rng: Random, tool: TaughtTool, held_out: bool = False) -> Task:
    """A question that this tool answers."""
    lists = FAMILIES[tool.family]
    words = {"noun": tool.noun}
    if tool.family in tool_values.VALUES:
        words["v"] = tool_values.VALUES[tool.family](rng, held_out)
    if tool.family in tool_values.SECOND_VALUES:
        words["w"] = tool_values.SECOND_VALUES[tool.family](rng, held_out)
    arguments: dict[str, Any] = {}
    question, unit = pick(rng, lists, "ask", held_out), ""
    for parameter, key in zip(tool.parameters, ("v", "w"), strict=False):
        if not parameter.options:
            arguments[parameter.name] = typed(words[key], parameter.type)
    for parameter in tool.parameters:
        if parameter.options:
            if rng.random() < 0.3:
                arguments[parameter.name] = rng.choice(parameter.options)
                unit = f" in {arguments[parameter.name]}"
                question = question[:-1] + unit + question[-1]
            elif parameter.required:
                arguments[parameter.name] = parameter.options[0]
    # A message is written to its end: no thanks may follow it.
    asked = question if tool.family == "message" else ask(rng, question)
    return Task(
        asked.format_map(words),
        lists["want"][0].format_map(words) + unit if "want" in lists else "",
        lists["do"][0].format_map(words) if "do" in lists else "",
        Call(tool.name, arguments),
        outcome(rng, tool.family, words),
        words,
    )


def follow_up(rng: Random, tool: TaughtTool, held_out: bool = False) -> Task | None:
    """`And in Rome?`, where the tool takes a place."""
    if tool.family not in ("weather", "time") or any(one.options for one in tool.parameters):
        return None
    task = data_task(rng, tool, held_out)
    line = rng.choice(
        ("And in {}?", "And what about {}?", "What about {}?", "And {}?", "and in {}", "Now {}.")
    )
    return Task(line.format(task.words["v"]), task.want, "", task.call, task.outcome, task.words)
