"""Tools as the agent frameworks write them into a request, each with its own noise."""

from collections.abc import Callable
from random import Random
from typing import Any

from tools.builtin.toolbox import Schema, TaughtTool, ToolParameter, described, title

_JSON_SCHEMA = "http://json-schema.org/draft-07/schema#"


def _value(parameter: ToolParameter) -> Schema:
    """The type; an optional one as pydantic writes `str | None`."""
    options: Schema = {"enum": list(parameter.options)} if parameter.options else {}
    if parameter.required:
        return {**options, "type": parameter.type}
    return {"anyOf": [{**options, "type": parameter.type}, {"type": "null"}], "default": None}


def _about(parameter: ToolParameter) -> Schema:
    return {"description": parameter.about} if parameter.about else {}


def _required(tool: TaughtTool) -> list[str]:
    return [one.name for one in tool.parameters if one.required]


def _function(tool: TaughtTool, parameters: Schema, **more: Any) -> Schema:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.describe, "parameters": parameters, **more},
    }


def openai_agents(tool: TaughtTool) -> Schema:
    properties = {
        one.name: {**_about(one), "title": title(one.name), **_value(one)} for one in tool.parameters
    }
    parameters = {
        "properties": properties,
        "required": [one.name for one in tool.parameters],  # a strict schema requires all of them
        "title": f"{tool.name}_args",
        "type": "object",
        "additionalProperties": False,
    }
    if _required(tool) != parameters["required"]:
        parameters["required"] = _required(tool)
        return _function(tool, parameters)
    return _function(tool, parameters, strict=True)


def pydantic_ai(tool: TaughtTool) -> Schema:
    properties = {one.name: {**_about(one), **_value(one)} for one in tool.parameters}
    parameters = {
        "additionalProperties": False,
        "properties": properties,
        "required": _required(tool),
        "type": "object",
    }
    return _function(tool, parameters, strict=True)


def langchain(tool: TaughtTool) -> Schema:
    properties = {one.name: {**_about(one), **_value(one)} for one in tool.parameters}
    return _function(tool, {"properties": properties, "required": _required(tool), "type": "object"})


def instructor(tool: TaughtTool) -> Schema:
    properties = {
        one.name: {**_about(one), "title": title(one.name), **_value(one)} for one in tool.parameters
    }
    parameters = {"properties": properties, "required": sorted(_required(tool)), "type": "object"}
    return _function(tool, parameters)


def vercel_ai(tool: TaughtTool) -> Schema:
    properties = {}
    for one in tool.parameters:
        options: Schema = {"enum": list(one.options)} if one.options else {}
        properties[one.name] = {"type": one.type, **options, **_about(one)}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": _required(tool),
        "additionalProperties": False,
        "$schema": _JSON_SCHEMA,
    }
    return _function(tool, parameters)


def plain(tool: TaughtTool) -> Schema:
    """As a person writes it by hand."""
    properties = {one.name: {"type": one.type, **_about(one)} for one in tool.parameters}
    for one in tool.parameters:
        if one.options:
            properties[one.name]["enum"] = list(one.options)
    return _function(tool, {"type": "object", "properties": properties, "required": _required(tool)})


FRAMEWORKS: dict[str, Callable[[TaughtTool], Schema]] = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langchain": langchain,
    "instructor": instructor,
    "ai": vercel_ai,
    "by hand": plain,
}


def written(rng: Random, tools: list[TaughtTool], short: bool) -> tuple[Schema, ...]:
    """The tools of a request: all by one framework, or each with noise of its own."""
    if short:
        return tuple(rng.choice((plain, langchain))(one) for one in tools)
    if rng.random() < 0.5:
        write = rng.choice(tuple(FRAMEWORKS.values()))
        return tuple(write(one) for one in tools)
    return tuple(described(rng, one) for one in tools)
