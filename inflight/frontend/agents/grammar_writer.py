"""Writer of answer grammars in llguidance's Lark dialect, shared by the formats of tool calls and reasoning.

The second half covers formats that write each argument separately by its name, rather than all of them in one JSON
object. Between tags a value is bare: a string without quotes, or JSON. The rules allow what `values.bare_text_to_json`
converts back to something that the parameter's schema allows. A strict tool is rejected if that cannot be guaranteed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from inflight.constraints.answer_rules import AnswerRules, RuleSchema
from inflight.constraints.grammars import literal
from inflight.constraints.input_lark import bare_input, json_quoted
from inflight.constraints.schema_document import is_annotation
from inflight.errors import ParameterError, shown
from inflight.frontend.agents.values import bare_text_to_json, resolve_reference, schema_types
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.structured_outputs import MAX_CONSTRAINT_LENGTH

ANY_OBJECT = {"type": "object"}
_GAP = "GAP: /[ \\t\\r\\n]{0,8}/"  # bounded, as some models would write line breaks forever
DEFINITIONS = ("$defs", "definitions")
_PER_PARAMETER = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
_STRING_KEYWORDS = {"type", "minLength", "maxLength", "enum", "const"}
INPUT = "input"  # the only parameter of a function that stands for a tool whose input is free text
INPUT_GRAMMAR = "input_grammar"  # the key of its `InputGrammar` in the function


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """The grammar of a tool's free text input, which models write as a string argument of a function."""

    syntax: Literal["lark", "regex"]
    definition: str
    param: str  # where the definition is in the request

    def lark(self, never: str | None) -> str:
        """Return it in Lark: for the inside of a JSON string or, with `never`, for text that does not match that regex.

        Raises ParameterError.
        """
        grammar = self.definition if self.syntax == "lark" else f"start: {_regex(self.definition)}"
        try:
            return json_quoted(grammar) if never is None else bare_input(grammar, never)
        except ValueError as error:
            raise ParameterError(
                f"{self.param}: {error}", param=self.param, code="invalid_constraint"
            ) from None


def _regex(text: str) -> str:
    """Return a regex between slashes, without anchors: it matches the whole input."""
    if text.startswith("^") and text.endswith("$"):
        text = text[1:-1]
    escaped = re.sub(r"(\\.)|/|\n", lambda match: match[1] or {"/": r"\/", "\n": r"\n"}[match[0]], text)
    return f"/{escaped}/"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, as far as a grammar needs it."""

    name: str
    schema: dict[str, Any]  # of its arguments, which are an object
    strict: bool
    param: str  # where the schema is in the request
    input_grammar: InputGrammar | None = None


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls: an opening, and what must follow it."""

    opening: str
    # Returns the expression after the opening: one call, or several if the flag is true.
    write: Callable[[GrammarWriter, Sequence[Tool], bool], str]
    repeats_opening: bool = True  # every call has its own opening
    # The character that starts a call at the start of an answer, if no opening is needed there.
    bare_start: str = ""
    # Other texts that the format's reader would take for the start of a call; they are never generated.
    forbidden: tuple[str, ...] = ()
    name_pattern: re.Pattern[str] | None = None  # of function names that the reader understands, None for all


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The constraints of a request on its answer."""

    tools: Sequence[Tool]
    is_required: bool  # at least one tool must be called
    parallel: bool  # several calls are allowed
    content: str | None  # the expression that the content must match, None for free text
    max_reasoning_tokens: int | None


@dataclass(slots=True)
class GrammarWriter:
    """Collects the rules of a grammar. Its methods return expressions that other rules can use."""

    tokenizer: Tokenizer | None
    markers: tuple[str, ...] = ()  # of the formats, which may be special tokens
    _rules: list[str] = field(default_factory=lambda: [_GAP])
    _tokens: dict[str, int] = field(default_factory=dict)
    _schemas: dict[str, RuleSchema] = field(default_factory=dict)
    _content: tuple[str, str] | None = None
    _grammars: dict[str, tuple[str, str]] = field(default_factory=dict)
    _num_repeated: int = 0  # characters of definitions

    def finish(self, start: str) -> AnswerRules:
        """Return all rules, with `start` as the expression for a whole answer."""
        rules = (f"start: {start}", *self._rules)
        return AnswerRules(rules, self._tokens, self._schemas, self._content, self._grammars)

    def rule(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def is_special(self, marker: str) -> bool:
        """Return whether a marker has a special token, which plain text never produces."""
        return any(token_id is not None for _, token_id in self._pieces(marker))

    def _pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Split a text at the markers that are special tokens. Yield each piece with the id of its token, if any."""
        pattern = "|".join(re.escape(marker) for marker in self.markers) or "(?!)"
        for piece in filter(None, re.split(f"({pattern})", text)):
            token_id = self.token_id(piece) if piece in self.markers else None
            special = self.tokenizer is not None and token_id in self.tokenizer.special_ids
            yield piece, token_id if special else None

    def token_id(self, marker: str) -> int | None:
        return self.tokenizer.token_id(marker) if self.tokenizer and marker else None

    def token(self, token_id: int) -> str:
        """Return an expression for exactly this token."""
        name = f"token_{token_id}"
        self._tokens[name] = token_id
        return name

    def terminals(self, *parts: str) -> str:
        """Return an expression for markers and texts in sequence; special tokens become tokens, the rest literals."""
        return " ".join(
            literal(piece) if token_id is None else self.token(token_id)
            for part in parts
            for piece, token_id in self._pieces(part)
        )

    def schema(self, name: str, schema: RuleSchema) -> str:
        self._schemas[name] = schema
        return name

    def definitions(self, tool: Tool) -> dict[str, Any]:
        """Return the definitions of a tool's schema, which the schema of each of its parameters repeats.

        Nothing is returned once the grammar is too long anyway: a thousand parameters could repeat 100 KB.
        """
        if self._num_repeated > MAX_CONSTRAINT_LENGTH:
            return {}
        definitions = {name: tool.schema[name] for name in DEFINITIONS if name in tool.schema}
        self._num_repeated += len(json.dumps(definitions))
        return definitions

    def user_content(self, syntax: str, text: str) -> str:
        """Return an expression for content that the user constrained with a regex or a grammar."""
        self._content = syntax, text
        return "@content"

    def json_input(self, grammar: InputGrammar) -> str:
        """Return an expression for a tool's free text input as a JSON string."""
        return rf'"\"" {self._input(grammar, None)} "\""'

    def bare_input(self, grammar: InputGrammar, ending: str, never: Sequence[str]) -> str:
        """Return an expression for a tool's free text input with its ending. `never` lists other endings."""
        special = next((piece for piece, token_id in self._pieces(ending) if token_id is not None), "")
        end_of_text = ending.partition(special)[0] if special else ending.strip()
        return f"{self._input(grammar, self._alternatives((end_of_text, *never)))} {self.terminals(ending)}"

    def _input(self, grammar: InputGrammar, never: str | None) -> str:
        name = f"input_{len(self._grammars)}"
        self._grammars[name] = grammar.param, grammar.lark(never)
        return f"@{name}"

    def arguments(self, tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
        """Return each tool with an expression for the JSON of its arguments."""
        return [(tool, self._arguments(f"arguments_{index}", tool)) for index, tool in enumerate(tools)]

    def _arguments(self, name: str, tool: Tool) -> str:
        if tool.input_grammar is not None:
            return self._json_object({INPUT: self.json_input(tool.input_grammar)})
        return self.schema(name, RuleSchema(tool.schema, tool.param, tool.strict, ANY_OBJECT))

    def _json_object(self, members: Mapping[str, str]) -> str:
        """Return an expression for a JSON object with these members in order."""
        pairs = (f'{literal(json.dumps(name))} GAP ":" GAP {value}' for name, value in members.items())
        return '"{" GAP ' + ' GAP "," GAP '.join(pairs) + ' GAP "}"'

    def json_call(self, tools: Sequence[Tool], key: str) -> str:
        """Return an expression for `{"name": ..., key: {...}}` with any of the tools."""
        alternatives = [self._json_call(f"call_{index}", tool, key) for index, tool in enumerate(tools)]
        return self.rule("call", " | ".join(alternatives))

    def _json_call(self, name: str, tool: Tool, key: str) -> str:
        if tool.input_grammar is not None:
            function = literal(json.dumps(tool.name))
            return self._json_object({"name": function, key: self._arguments(name, tool)})
        return self.schema(name, RuleSchema(tool.schema, tool.param, tool.strict, ANY_OBJECT, tool.name, key))

    def text(
        self,
        name: str,
        never: Sequence[str] = (),
        never_first: Sequence[str] = (),
        length: str = "*",
        first: str = "",
        last: str = "",
    ) -> str:
        """Return a terminal for free text that does not contain `never` or start with `never_first`.

        `length` is a regex quantifier for the number of characters, between those that match the regex `first` and the
        text `last`.
        """
        parts = [f"/{first}(?s:.){length}{escape_regex(last)}/"]
        if inside := self._alternatives(never):
            parts.append(f"~/(?s:.*)({inside})(?s:.*)/")
        if first := self._alternatives(never_first):
            parts.append(f"~/[ \\t\\r\\n]*({first})(?s:.*)/")
        return self.rule(name, " & ".join(parts))

    def text_until(
        self,
        name: str,
        ending: str,
        never: Sequence[str] = (),
        never_first: Sequence[str] = (),
        length: str = "*",
    ) -> str:
        """Return an expression for free text up to the first ending, and the ending."""
        special = next((piece for piece, token_id in self._pieces(ending) if token_id is not None), "")
        if not special:
            text = self.text(name.upper(), never, never_first, length)
            return self.rule(f"{name}[lazy]", f"{text} {self.terminals(ending)}")
        # The text ends where a special token comes, so it includes what precedes that token.
        before, _, after = ending.partition(special)
        text = self.text(name.upper(), never, never_first, length, last=before)
        return f"{text} {self.terminals(special, after)}"

    def _alternatives(self, texts: Sequence[str]) -> str:
        """Return a regex for any of the texts, without special tokens, which are never text."""
        return "|".join(escape_regex(text) for text in texts if text and not self.is_special(text))


def escape_regex(text: str) -> str:
    """Escape a text for use inside a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda match: "\\" + match[0], text)


class Parameter(NamedTuple):
    """A parameter of a tool."""

    tool: Tool
    name: str
    schema: dict[str, Any]
    required: bool
    rule: str  # the name of its rule


def tool_parameters(tools: Sequence[Tool], readable: re.Pattern[str]) -> list[list[Parameter]]:
    """Return the parameters of each tool in the order in which they are written. Raises ParameterError.

    Their names must match `readable`.
    """
    return [_parameters(f"parameter_{number}", tool, readable) for number, tool in enumerate(tools)]


def _parameters(rule: str, tool: Tool, readable: re.Pattern[str]) -> list[Parameter]:
    for keyword in tool.schema:
        if keyword not in _PER_PARAMETER and not is_annotation(keyword):
            reject_if_strict(tool, keyword, "#")
    properties, required = tool.schema.get("properties"), tool.schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    parameters = []
    for index, name in enumerate(dict.fromkeys((*properties, *required))):
        if not readable.fullmatch(name) or name != name.strip() or not name:
            if tool.strict or name in required:
                raise ParameterError(
                    f"{tool.param} has the property {shown(name)}: "
                    "this model's tool call format cannot express that name",
                    param=tool.param,
                )
            continue
        schema = resolve_reference(properties.get(name, {}), tool.schema)
        schema = schema if isinstance(schema, dict) else {}
        parameters.append(Parameter(tool, name, schema, name in required, f"{rule}_{index}"))
    return parameters


def reject_if_strict(tool: Tool, keyword: str, path: str) -> None:
    """Raise for a keyword that the format cannot guarantee, if the tool is strict."""
    if tool.strict:
        raise ParameterError(
            f"{tool.param}: the keyword {keyword!r}, at {path}, is not supported by this model's tool call format",
            param=tool.param,
            code="unsupported_keyword",
        )


def parameter_sequence(parameters: list[Parameter], write: Callable[[Parameter], str]) -> str:
    """Return an expression for the parameters in order; optional ones may be omitted."""
    expressions = (f"({write(parameter)})" + ("" if parameter.required else "?") for parameter in parameters)
    return " ".join(expressions)


def separated_parameters(
    writer: GrammarWriter, parameters: list[Parameter], write: Callable[[Parameter], str], separator: str
) -> str:
    """Return an expression for the parameters in order, with separators between the present ones."""
    tail = ""  # what may follow the current parameter
    alternatives: list[str] = []  # to start with
    for parameter in reversed(parameters):
        argument = write(parameter)
        if parameter.required:
            alternatives.clear()
        alternatives.append(f"{argument} {tail}")
        next_argument = f"{separator} {argument}"
        tail = writer.rule(
            f"{parameter.rule}_tail",
            f"{next_argument if parameter.required else f'({next_argument})?'} {tail}",
        )
    optional = "" if any(parameter.required for parameter in parameters) else "?"
    return f"({' | '.join(alternatives)}){optional}" if alternatives else ""


def json_value(writer: GrammarWriter, parameter: Parameter) -> str:
    """Return an expression for a parameter's value as JSON."""
    tool, schema = parameter.tool, parameter.schema
    if tool.input_grammar is not None:
        return writer.json_input(tool.input_grammar)
    for reference in _references(schema):
        if not reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
            reject_if_strict(tool, "$ref", f"#/properties/{parameter.name}")
            schema = {}
            break
    types = sorted(schema_types(schema))
    loose: Any = {"type": types} if types else True
    whole = {**schema, **writer.definitions(tool)}
    return writer.schema(parameter.rule, RuleSchema(whole, tool.param, tool.strict, loose))


def bare_value(writer: GrammarWriter, parameter: Parameter, ending: str, never: tuple[str, ...] = ()) -> str:
    """Return an expression for a parameter's value as bare text with its ending. `never` lists other endings."""
    schema = parameter.schema
    if parameter.tool.input_grammar is not None:
        return writer.bare_input(parameter.tool.input_grammar, ending, never)
    types = schema_types(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        pairs = zip(texts, values, strict=True)
        texts = [text for text, value in pairs if _reads_as(text, value, types)]
        if texts:
            alternatives = " | ".join(f"/{escape_regex(text)}/" for text in texts if text)
            return f"({alternatives}) {writer.terminals(ending)}"
        reject_if_strict(parameter.tool, "enum", f"#/properties/{parameter.name}")
    elif types and "string" not in types:
        return f"GAP {json_value(writer, parameter)} GAP {writer.terminals(ending.strip())}"
    return _bare_text(writer, parameter, types, ending, never)


def may_be_text(parameter: Parameter) -> bool:
    """Return whether `bare_value` allows any text."""
    listed = "enum" in parameter.schema or "const" in parameter.schema
    types = schema_types(parameter.schema)
    return parameter.tool.input_grammar is None and not listed and (not types or "string" in types)


def _bare_text(
    writer: GrammarWriter, parameter: Parameter, types: frozenset[str], ending: str, never: tuple[str, ...]
) -> str:
    schema = parameter.schema
    allowed = _STRING_KEYWORDS if types == {"string"} else {"type"}
    alternatives = [schema.get(name) for name in ("anyOf", "oneOf")]
    for keyword in schema:
        if keyword in allowed or is_annotation(keyword):
            continue
        if keyword in ("anyOf", "oneOf") and all(map(_only_types, alternatives)):
            continue
        reject_if_strict(parameter.tool, keyword, f"#/properties/{parameter.name}")
    length = length_quantifier(schema) if types == {"string"} else "*"
    return writer.text_until(parameter.rule, ending, (ending.strip(), *never), length=length)


def length_quantifier(schema: dict[str, Any]) -> str:
    """Return the regex quantifier for the allowed lengths of a string."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    numbers = [value for value in (least, most) if type(value) is int and value >= 0]
    return f"{{{least},{most}}}" if len(numbers) == 1 + (most != "") else "*"


def _only_types(alternatives: Any) -> bool:
    """Return whether the alternatives of a schema name types and constrain nothing else."""
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
    converted = json.dumps(text) if types == {"string"} else bare_text_to_json(text, types)
    return bool(json.loads(converted) == value)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
