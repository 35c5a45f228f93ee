"""Writes the grammar of an answer, in llguidance's Lark: what formats of calls and of reasoning share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inflight.agents.values import resolved, types_of, value_json
from inflight.constraints import AnswerRules, RuleSchema, is_annotation, literal
from inflight.errors import ParameterError, shown
from inflight.text import Tokenizer

ANY_OBJECT = {"type": "object"}
_GAP = "GAP: /[ \\t\\r\\n]{0,8}/"  # some models would never stop to break lines


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, as a grammar needs to know it."""

    name: str
    schema: dict[str, Any]  # of its arguments, which are an object
    strict: bool
    param: str  # where a request has the schema


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls: an opening, and what must follow it."""

    opening: str
    # What follows the opening, as an expression. It may hold several calls if asked to.
    write: Callable[[RuleWriter, Sequence[Tool], bool], str]
    repeats: bool = True  # whether every call has an opening of its own
    # The character that begins a call at the beginning of an answer, where it needs no opening.
    bare: str = ""
    # What else a reader would take for the beginning of a call; it is never written.
    never: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None  # of functions that a reader understands, None for all


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What a request asks of its answer."""

    tools: Sequence[Tool]
    is_required: bool  # to call one
    parallel: bool  # several calls
    content: str | None  # the expression that it must match, None for free text
    max_reasoning_tokens: int | None


@dataclass(slots=True)
class RuleWriter:
    """The rules so far. Whoever adds some says what they stand for: an expression that others can use."""

    tokenizer: Tokenizer | None
    _rules: list[str] = field(default_factory=lambda: [_GAP])
    _tokens: dict[str, int] = field(default_factory=dict)
    _schemas: dict[str, RuleSchema] = field(default_factory=dict)
    _content: tuple[str, str] | None = None

    def answer(self, start: str) -> AnswerRules:
        """All rules, with the one that an answer is."""
        return AnswerRules((f"start: {start}", *self._rules), self._tokens, self._schemas, self._content)

    def rule(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def is_special(self, marker: str) -> bool:
        """Whether a marker is a token that no text spells."""
        token_id = self.token_id(marker)
        return token_id is not None and self.tokenizer is not None and token_id in self.tokenizer.special_ids

    def token_id(self, marker: str) -> int | None:
        return self.tokenizer.token_id(marker) if self.tokenizer and marker else None

    def token(self, token_id: int) -> str:
        """One token and no other."""
        name = f"token_{token_id}"
        self._tokens[name] = token_id
        return name

    def marked(self, *parts: str) -> str:
        """Markers and texts, one after the other: those that are special tokens as tokens."""
        said = []
        for part in filter(None, parts):
            token_id = self.token_id(part)
            special = token_id is not None and self.is_special(part)
            said.append(self.token(token_id) if special and token_id is not None else literal(part))
        return " ".join(said)

    def schema(self, name: str, schema: RuleSchema) -> str:
        self._schemas[name] = schema
        return name

    def user_content(self, kind: str, text: str) -> str:
        """What a user asked for in a language of its own."""
        self._content = kind, text
        return "@content"

    def arguments(self, tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
        """The tools, each with the JSON of its arguments."""
        return [
            (
                tool,
                self.schema(
                    f"arguments_{index}",
                    RuleSchema(tool.schema, tool.param, tool.strict, ANY_OBJECT),
                ),
            )
            for index, tool in enumerate(tools)
        ]

    def json_call(self, tools: Sequence[Tool], key: str) -> str:
        """`{"name": ..., key: {...}}`, for any of the tools."""
        ways = [
            self.schema(
                f"call_{index}",
                RuleSchema(tool.schema, tool.param, tool.strict, ANY_OBJECT, tool.name, key),
            )
            for index, tool in enumerate(tools)
        ]
        return self.rule("call", " | ".join(ways))

    def text(
        self, name: str, never: Sequence[str] = (), never_first: Sequence[str] = (), length: str = "*"
    ) -> str:
        """A terminal: free text without some texts in it, and without others at its beginning. `length` is how often a
        character comes, as expressions say it."""
        parts = [f"/(?s:.){length}/"]
        if inside := _spelled(self, never):
            parts.append(f"~/(?s:.*)({inside})(?s:.*)/")
        if first := _spelled(self, never_first):
            parts.append(f"~/[ \\t\\r\\n]*({first})(?s:.*)/")
        return self.rule(name, " & ".join(parts))


def regex(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found[0], text)


def _spelled(writer: RuleWriter, texts: Sequence[str]) -> str:
    """As alternatives of an expression; special tokens never are text."""
    return "|".join(regex(text) for text in texts if text and not writer.is_special(text))


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
