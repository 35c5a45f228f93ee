"""Tools as agents describe them: a function with a JSON schema, and the noise that frameworks add to it."""

from dataclasses import dataclass
from random import Random
from typing import Any

from tools.builtin.grammar import capital
from tools.builtin.tables import sections

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolParameter:
    name: str
    type: str = "string"
    about: str = ""
    required: bool = True
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaughtTool:
    family: str
    name: str
    describe: str
    parameters: tuple[ToolParameter, ...] = ()
    noun: str = ""  # what a tool of the family `attribute` returns
    opaque: bool = False  # its name says nothing, so it needs its descriptions


def title(name: str) -> str:
    return " ".join(capital(word) for word in name.split("_"))


def _property(rng: Random, parameter: ToolParameter, titled: bool, described: bool) -> Schema:
    entries: list[tuple[str, Any]] = [("type", parameter.type)]
    if titled:
        entries.append(("title", title(parameter.name)))
    if described and parameter.about:
        entries.append(("description", parameter.about))
    if parameter.options:
        entries.append(("enum", list(parameter.options)))
    if not parameter.required and rng.random() < 0.3:
        entries = [("anyOf", [dict(entries[:1]), {"type": "null"}]), *entries[1:], ("default", None)]
    if rng.random() < 0.4:
        rng.shuffle(entries)
    return dict(entries)


def _parameters(rng: Random, tool: TaughtTool) -> Schema:
    titled, described = rng.random() < 0.3, tool.opaque or rng.random() < 0.6
    properties = {one.name: _property(rng, one, titled, described) for one in tool.parameters}
    required = [one.name for one in tool.parameters if one.required]
    entries: list[tuple[str, Any]] = [("type", "object"), ("properties", properties)]
    if required or rng.random() < 0.5:
        entries.append(("required", required))
    if rng.random() < 0.4:
        entries.append(("additionalProperties", False))
    if rng.random() < 0.25:
        entries.append(
            ("title", rng.choice((f"{tool.name}_args", title(tool.name), f"{tool.name}Arguments")))
        )
    if rng.random() < 0.12:
        entries.append(("$schema", "http://json-schema.org/draft-07/schema#"))
    roll = rng.random()
    if roll < 0.3:
        entries.sort()
    elif roll < 0.5:
        rng.shuffle(entries)
    return dict(entries)


def _description(rng: Random, tool: TaughtTool) -> str:
    text = tool.describe
    roll = rng.random()
    if roll < 0.1:
        text = text.rstrip(".")
    elif roll < 0.25 and tool.parameters:
        lines = "\n".join(f"    {one.name}: {one.about or 'a value'}" for one in tool.parameters)
        text = f"{text}\n\nArgs:\n{lines}"
    elif roll < 0.4:
        text = f"{text} {rng.choice(sections('systems')['systems']['long'][:8])}"
    return text


def described(rng: Random, tool: TaughtTool) -> Schema:
    """The tool as a request sends it, in one of the many ways there are."""
    entries: list[tuple[str, Any]] = [("name", tool.name)]
    if tool.opaque or rng.random() < 0.9:
        entries.append(("description", _description(rng, tool)))
    if tool.parameters or rng.random() < 0.7:
        entries.append(("parameters", _parameters(rng, tool)))
    if rng.random() < 0.3:
        entries.append(("strict", rng.random() < 0.7))
    if rng.random() < 0.25:
        rng.shuffle(entries)
    return {"type": "function", "function": dict(entries)}
