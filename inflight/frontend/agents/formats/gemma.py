"""Gemma 4 and FunctionGemma: `call:name{key:value,...}` with strings between special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inflight.constraints.schema_document import is_annotation
from inflight.frontend.agents.formats.base import CallEmitter, ToolFormat
from inflight.frontend.agents.grammar_writer import (
    DEFINITIONS,
    CallGrammar,
    GrammarWriter,
    Parameter,
    Tool,
    json_value,
    length_quantifier,
    reject_if_strict,
    separated_parameters,
    tool_parameters,
)
from inflight.frontend.agents.source import Markers, Reading, Source
from inflight.frontend.agents.values import bare_text_to_json, json_string, resolve_reference, schema_types

_MAX_DEPTH = 64  # of nested values that are read
_MAX_WRITTEN_DEPTH = 8  # of nested values whose schemas are followed
_CALL = "call:"
_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"[^:{}\[\],<]*")
_BARE = re.compile(r"[^,{}\[\]<]*")
_JSON_TYPES = {"integer", "number", "boolean", "null"}  # written as in JSON
_NUMBER = "/-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?/"
_WORDS = {"null": '"null"', "boolean": '("true" | "false")', "integer": "/-?(0|[1-9][0-9]{0,14})/"}
_LOOSE = {**_WORDS, "number": _NUMBER, "object": "any_object", "array": "any_array"}
_KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "object": {"properties", "required", "additionalProperties", *DEFINITIONS},
    "array": {"items"},
}


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """The markers around a call, and the one on both sides of a string."""

    opening: str
    closing: str
    quote: str

    def format(self) -> ToolFormat:
        grammar = CallGrammar(self.opening, self.write, name_pattern=_NAME)
        markers = self.opening, self.closing, self.quote
        return ToolFormat(markers, Markers(self.opening), self.read, (self.closing,), grammar)

    def read(self, source: Source, calls: CallEmitter, _: str) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        name = ""
        if (yield from source.accept(_CALL)):
            name = yield from source.take_while(_NAME)
            yield from source.skip_space()
        if not name or not (yield from source.accept("{")):
            source.rewind()
            return False
        source.release()
        yield calls.begin(name)
        complete = yield from self._read_members(source, calls, name, 0)
        yield from calls.end(complete)
        return True

    def _read_members(self, source: Source, calls: CallEmitter, function: str, depth: int) -> Reading[bool]:
        """Read an object after its brace. `function` is the name of the function whose arguments these are, or ""."""
        before = "{"
        while True:
            yield from source.skip_space()
            if (yield from source.accept("}")):
                yield calls.arguments("{}" if before == "{" else "}")
                return True
            if before == ", " and not (yield from source.accept(",")):
                return False
            yield from source.skip_space()
            key = yield from self._take_key(source)
            if not key or not (yield from source.accept(":")):
                return False
            yield calls.arguments(f"{before}{json_string(key)}: ")
            before = ", "
            types = schema_types(calls.schema(function, key)) if function else frozenset[str]()
            if not (yield from self._read_value(source, calls, types, depth + 1)):
                return False

    def _take_key(self, source: Source) -> Reading[str]:
        if (yield from source.accept(self.quote)):
            return (yield from source.take_until(Markers(self.quote)))[0]
        return (yield from source.take_while(_KEY)).strip()

    def _read_value(
        self, source: Source, calls: CallEmitter, types: frozenset[str], depth: int
    ) -> Reading[bool]:
        """Emit a value as JSON. Return False if it is cut short. `types` are those of the schema, if known."""
        yield from source.skip_space()
        if depth > _MAX_DEPTH:
            return False
        if (yield from source.accept(self.quote)):
            return (yield from self._read_string(source, calls, types))
        if (yield from source.accept("{")):
            return (yield from self._read_members(source, calls, "", depth))
        if (yield from source.accept("[")):
            return (yield from self._read_items(source, calls, depth))
        text = yield from source.take_while(_BARE)
        if not text.strip() or not (yield from source.peek()):  # it may be a part of a value
            if text.strip():
                yield calls.arguments(text.strip())
            return False
        yield calls.arguments(bare_text_to_json(text.strip(), types))
        return True

    def _read_string(self, source: Source, calls: CallEmitter, types: frozenset[str]) -> Reading[bool]:
        quotes = Markers(self.quote)
        if types and "string" not in types:  # a number in quotes, for example
            text, ending = yield from source.take_until(quotes)
            yield calls.arguments(bare_text_to_json(text, types) if ending else json_string(text)[:-1])
            return ending is not None
        yield calls.arguments('"')
        ending = yield from source.emit_until(quotes, lambda text: calls.arguments(json_string(text)[1:-1]))
        if ending is not None:
            yield calls.arguments('"')
        return ending is not None

    def _read_items(self, source: Source, calls: CallEmitter, depth: int) -> Reading[bool]:
        before = "["
        while True:
            yield from source.skip_space()
            if (yield from source.accept("]")):
                yield calls.arguments("[]" if before == "[" else "]")
                return True
            if before == ", " and not (yield from source.accept(",")):
                return False
            yield calls.arguments(before)
            before = ", "
            if not (yield from self._read_value(source, calls, frozenset(), depth + 1)):
                return False

    def write(self, writer: GrammarWriter, tools: Sequence[Tool], _: bool) -> str:
        alternatives = [
            f'{writer.terminals(f"{_CALL}{tool.name}{{")} {self._write_members(writer, parameters, 0)} "}}"'
            for tool, parameters in zip(tools, tool_parameters(tools, _NAME), strict=True)
        ]
        string = f"{writer.terminals(self.quote)} {writer.text_until('any_text', self.quote, (self.quote,))}"
        writer.rule(
            "any_value", f'{string} | {_NUMBER} | {_WORDS["boolean"]} | "null" | any_object | any_array'
        )
        writer.rule("any_member", '/[a-zA-Z_]{1,32}/ ":" any_value')
        writer.rule("any_object", '"{" (any_member ("," any_member)*)? "}"')
        writer.rule("any_array", '"[" (any_value ("," any_value)*)? "]"')
        return f"({' | '.join(alternatives)}) {writer.terminals(self.closing)}"

    def _write_members(self, writer: GrammarWriter, parameters: list[Parameter], depth: int) -> str:
        def write_member(parameter: Parameter) -> str:
            return f"{writer.terminals(f'{parameter.name}:')} {self._write_value(writer, parameter, depth)}"

        return separated_parameters(writer, parameters, write_member, '","')

    def _write_value(self, writer: GrammarWriter, parameter: Parameter, depth: int) -> str:
        """Return an expression for a value. Reject constraints of strict tools that the format cannot guarantee."""
        if parameter.tool.input_grammar is not None:
            return f"{writer.terminals(self.quote)} {writer.bare_input(parameter.tool.input_grammar, self.quote, ())}"
        schema, types = parameter.schema, schema_types(parameter.schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and not any(isinstance(value, list | dict) for value in values):
            return f"({' | '.join(self._write_constant(writer, value) for value in values)})"
        if types and types <= _JSON_TYPES:
            return json_value(writer, parameter)
        allowed = _KEYWORDS.get(next(iter(types)), set()) if len(types) == 1 else {"anyOf", "oneOf"}
        for keyword in schema:
            if keyword not in allowed | {"type"} and not is_annotation(keyword):
                reject_if_strict(parameter.tool, keyword, f"#/properties/{parameter.name}")
        if types == {"string"}:
            return self._write_string(writer, parameter)
        if types == {"object"} and schema.get("properties") and depth < _MAX_WRITTEN_DEPTH:
            return self._write_object(writer, parameter, depth)
        if types == {"array"} and "items" in schema and depth < _MAX_WRITTEN_DEPTH:
            items = resolve_reference(schema["items"], parameter.tool.schema)
            item = parameter._replace(
                schema=items if isinstance(items, dict) else {}, rule=f"{parameter.rule}_item"
            )
            value = writer.rule(f"{item.rule}_value", self._write_value(writer, item, depth + 1))
            return f'"[" ({value} ("," {value})*)? "]"'
        if not types or not types <= _LOOSE.keys() | {"string"}:
            return "any_value"
        expressions = [_LOOSE[name] for name in sorted(types - {"string"})]
        if "string" in types:
            expressions.append(self._write_string(writer, parameter))
        return f"({' | '.join(expressions)})"

    def _write_string(self, writer: GrammarWriter, parameter: Parameter) -> str:
        schema = parameter.schema if schema_types(parameter.schema) == {"string"} else {}
        text = writer.text_until(
            f"{parameter.rule}_text", self.quote, (self.quote,), length=length_quantifier(schema)
        )
        return f"{writer.terminals(self.quote)} {text}"

    def _write_constant(self, writer: GrammarWriter, value: Any) -> str:
        if isinstance(value, str):
            return writer.terminals(self.quote, value, self.quote)
        return writer.terminals(json.dumps(value))

    def _write_object(self, writer: GrammarWriter, parameter: Parameter, depth: int) -> str:
        tool = parameter.tool
        definitions = {name: tool.schema[name] for name in DEFINITIONS if name in tool.schema}
        nested = replace(tool, schema={**parameter.schema, **definitions})
        [members] = tool_parameters([nested], _NAME)
        named = [member._replace(rule=f"{parameter.rule}_{index}") for index, member in enumerate(members)]
        return f'"{{" {self._write_members(writer, named, depth + 1)} "}}"'


GEMMA4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>').format()
FUNCTIONGEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>").format()
