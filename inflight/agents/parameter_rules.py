"""Grammars of calls whose arguments stand one by one, each by its name, rather than in one JSON object.

What is between tags is bare: a string without quotes, or JSON. Rules here allow what `typed_values.py` reads back as
something that the parameter's schema allows; what they cannot promise is refused if the tool is strict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from inflight.agents.rule_writer import RuleWriter, Tool, regex
from inflight.agents.schema_types import resolved, types_of
from inflight.agents.typed_values import value_json
from inflight.constraints import RuleSchema, is_annotation
from inflight.errors import ParameterError, shown

_DEFINITIONS = ("$defs", "definitions")
_PER_PARAMETER = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_OF_STRINGS = {"type", "minLength", "maxLength", "enum", "const"}


class Parameter(NamedTuple):
    """One of a tool's."""

    tool: Tool
    name: str
    schema: dict[str, Any]
    required: bool
    rule: str  # a name for it


def parameters(tools: Sequence[Tool], readable: re.Pattern[str]) -> list[list[Parameter]]:
    """Those of each tool, in the order in which they are written. Raises ParameterError.

    Their names must be `readable`.
    """
    return [_parameters(f"parameter_{number}", tool, readable) for number, tool in enumerate(tools)]


def _parameters(rule: str, tool: Tool, readable: re.Pattern[str]) -> list[Parameter]:
    for keyword in tool.schema:
        if keyword not in _PER_PARAMETER and not is_annotation(keyword):
            _refuse(tool, keyword, "#")
    known, required = tool.schema.get("properties"), tool.schema.get("required")
    known = known if isinstance(known, dict) else {}
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    found = []
    for place, name in enumerate(dict.fromkeys((*known, *needed))):
        if not readable.fullmatch(name) or name != name.strip() or not name:
            if tool.strict or name in needed:
                raise ParameterError(
                    f"{tool.param} has the property {shown(name)}: this model cannot write such a name",
                    param=tool.param,
                )
            continue
        schema = resolved(known.get(name, {}), tool.schema)
        schema = schema if isinstance(schema, dict) else {}
        found.append(Parameter(tool, name, schema, name in needed, f"{rule}_{place}"))
    return found


def _refuse(tool: Tool, keyword: str, path: str) -> None:
    """What the format cannot promise, if somebody insists on it."""
    if tool.strict:
        raise ParameterError(
            f"{tool.param}: the keyword {keyword!r}, at {path}, is not supported with the way in which this model "
            "writes calls",
            param=tool.param,
            code="unsupported_keyword",
        )


def all_of(given: list[Parameter], written: Callable[[Parameter], str]) -> str:
    """One after the other, those that are not required if wanted."""
    said = (f"({written(parameter)})" + ("" if parameter.required else "?") for parameter in given)
    return " ".join(said)


def json_value(writer: RuleWriter, parameter: Parameter) -> str:
    """A parameter as JSON."""
    tool, schema = parameter.tool, parameter.schema
    for reference in _references(schema):
        if not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)):
            _refuse(tool, "$ref", f"#/properties/{parameter.name}")
            schema = {}
            break
    definitions = {name: tool.schema[name] for name in _DEFINITIONS if name in tool.schema}
    types = sorted(types_of(schema))
    loose: Any = {"type": types} if types else True
    return writer.schema(
        parameter.rule, RuleSchema({**schema, **definitions}, tool.param, tool.strict, loose)
    )


def bare_value(writer: RuleWriter, parameter: Parameter, ending: str, never: tuple[str, ...] = ()) -> str:
    """A parameter as bare text and its ending. `never` are other texts that would end it."""
    schema = parameter.schema
    types = types_of(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        pairs = zip(texts, values, strict=True)
        texts = [text for text, value in pairs if _reads_as(text, value, types)]
        if texts:
            said = " | ".join(f"/{regex(text)}/" for text in texts if text)
            return f"({said}) {writer.marked(ending)}"
        _refuse(parameter.tool, "enum", f"#/properties/{parameter.name}")
    elif types and "string" not in types:
        return f"GAP {json_value(writer, parameter)} GAP {writer.marked(ending.strip())}"
    return _text(writer, parameter, types, ending, never)


def _text(
    writer: RuleWriter, parameter: Parameter, types: frozenset[str], ending: str, never: tuple[str, ...]
) -> str:
    schema = parameter.schema
    allowed = _OF_STRINGS if types == {"string"} else {"type"}
    alternatives = [schema.get(name) for name in ("anyOf", "oneOf")]
    for keyword in schema:
        if keyword in allowed or is_annotation(keyword):
            continue
        if keyword in ("anyOf", "oneOf") and all(map(_only_types, alternatives)):
            continue
        _refuse(parameter.tool, keyword, f"#/properties/{parameter.name}")
    text = writer.text(
        parameter.rule.upper(),
        (ending.strip(), *never),
        length=_length(schema) if types == {"string"} else "*",
    )
    if writer.is_special(ending):
        return f"{text} {writer.marked(ending)}"
    return writer.rule(f"{parameter.rule}[lazy]", f"{text} {writer.marked(ending)}")


def _length(schema: dict[str, Any]) -> str:
    """How many characters a string has, as an expression says it."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    numbers = [value for value in (least, most) if type(value) is int and value >= 0]
    return f"{{{least},{most}}}" if len(numbers) == 1 + (most != "") else "*"


def _only_types(alternatives: Any) -> bool:
    """Whether schemas tell types apart and say no more."""
    return alternatives is None or (
        isinstance(alternatives, list)
        and all(
            isinstance(schema, dict)
            and "type" in schema
            and all(key == "type" or is_annotation(key) for key in schema)
            for schema in alternatives
        )
    )


def _reads_as(text: str, value: Any, types: frozenset[str]) -> bool:
    said = json.dumps(text) if types == {"string"} else value_json(text, types)
    return bool(json.loads(said) == value)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
