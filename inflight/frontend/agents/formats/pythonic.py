"""Calls in Python's syntax, `name(key=value, ...)`, in a list or one per line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.frontend.agents.formats.base import CallEmitter, ToolFormat
from inflight.frontend.agents.grammar_writer import (
    CallGrammar,
    GrammarWriter,
    Parameter,
    Tool,
    json_value,
    separated_parameters,
    tool_parameters,
)
from inflight.frontend.agents.source import Markers, Reading, Source
from inflight.frontend.agents.values import json_string, python_to_json, schema_types

_NAME = re.compile(r"[\w.\-]*")
_IN_VALUE = re.compile(r"""[^,()\[\]{}'"]*""")
_IN_STRING = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """The text around Python calls."""

    opening: str
    closing: str
    brackets: bool = True  # around the calls, which then have commas between them
    # A list at the start of a message counts as calls too, if it names one of the request's tools.
    bare: bool = False

    def format(self) -> ToolFormat:
        grammar = CallGrammar(
            self.opening,
            self.write,
            repeats_opening=False,
            bare_start="\\[" if self.bare else "",
            name_pattern=_NAME,
        )
        markers = self.opening, self.closing
        return ToolFormat(markers, Markers(self.opening), self.read, (self.closing,), grammar)

    def read(self, source: Source, calls: CallEmitter, _: str) -> Reading[bool]:
        if not (yield from self._read_call(source, calls, "[" if self.brackets else "")):
            return False
        while (yield from self._read_call(source, calls, "," if self.brackets else "")):
            pass
        if self.brackets:
            yield from source.accept_after_space("]")
        return True

    def _read_call(self, source: Source, calls: CallEmitter, separator: str) -> Reading[bool]:
        """Read one call. Its first event is emitted once the name of its first argument is known."""
        source.hold()
        yield from source.skip_space()
        separated = (yield from source.accept(separator)) is not None
        yield from source.skip_space()
        name = yield from source.take_while(_NAME)
        is_known = not self.bare or calls.may_call(name)
        if not (separated and name and is_known and (yield from source.accept("("))):
            source.rewind()
            return False
        yield from source.skip_space()
        closed = (yield from source.accept(")")) is not None
        key = "" if closed else (yield from _take_key(source))
        if not key and not closed:
            source.rewind()
            return False
        source.release()
        yield calls.begin(name)
        complete = closed or (yield from _read_arguments(source, calls, key))
        yield from calls.end(complete)
        return True

    def write(self, writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
        alternatives = (
            f"{writer.terminals(f'{tool.name}(')} {_write_arguments(writer, parameters)} GAP "
            f"{writer.terminals(')')}"
            for tool, parameters in zip(tools, tool_parameters(tools, _NAME), strict=True)
        )
        call = writer.rule("call", " | ".join(alternatives))
        end = writer.terminals(self.closing)
        if self.bare:  # without an opening there is no closing
            end = f"({end})?" if writer.is_special(self.closing) else ""
        if not self.brackets:
            line_break = writer.rule("BREAK", "/[ \\t]{0,8}\\n[ \\t\\r\\n]{0,8}/")
            more = f"({line_break} {call})*" if parallel else ""
            return f"GAP {call} {more} {line_break}? {end}"
        more = f'(GAP "," GAP {call})*' if parallel else ""
        return f'GAP "[" GAP {call} {more} GAP "]" {end}'


def _read_arguments(source: Source, calls: CallEmitter, key: str) -> Reading[bool]:
    """Read values and further keys up to the bracket. Return False if something else comes first."""
    before = "{"
    while True:
        value, ending = yield from _take_value(source)
        converted = value if ending is None else python_to_json(value) or json_string(value)
        yield calls.arguments(f"{before}{json_string(key)}: {converted}")
        if ending is None:
            return False
        if ending == ",":
            before = ", "
            source.hold()
            key = yield from _take_key(source)
            if key:
                source.release()
                continue
            source.rewind()
            if not (yield from source.accept_after_space(")")):
                return False
        yield calls.arguments("}")
        return True


def _take_key(source: Source) -> Reading[str]:
    """Return the name before an equals sign, or "" if there is none."""
    yield from source.skip_space()
    key = yield from source.take_while(_NAME)
    yield from source.skip_space()
    return key if key and (yield from source.accept("=")) else ""


def _take_value(source: Source) -> Reading[tuple[str, str | None]]:
    """Return the text of a value and the comma or bracket after it, None if the text ends first."""
    parts = []
    depth = 0
    while True:
        parts.append((yield from source.take_while(_IN_VALUE)))
        character = yield from source.peek()
        if not character:
            return "".join(parts).strip(), None
        source.take(1)
        if depth == 0 and character in ",)":
            return "".join(parts).strip(), character
        parts.append(character)
        if character in "'\"":
            parts.append((yield from _take_string(source, character)))
        elif character != ",":
            depth = depth + 1 if character in "([{" else max(depth - 1, 0)


def _take_string(source: Source, quote: str) -> Reading[str]:
    """Return the rest of a string, including its closing quote."""
    parts = []
    while True:
        parts.append((yield from source.take_while(_IN_STRING[quote])))
        character = yield from source.peek()
        parts.append(source.take(len(character)))
        if character == "\\":
            parts.append(source.take(len((yield from source.peek()))))
        else:
            return "".join(parts)


def _write_arguments(writer: GrammarWriter, parameters: list[Parameter]) -> str:
    return separated_parameters(
        writer,
        parameters,
        lambda parameter: f"{writer.terminals(f'{parameter.name}=')} {_write_value(writer, parameter)}",
        'GAP "," GAP',
    )


def _write_value(writer: GrammarWriter, parameter: Parameter) -> str:
    """Return an expression for a value in JSON, which Python can read except for three words."""
    types = schema_types(parameter.schema)
    if types == {"boolean"} and not parameter.schema.keys() & {"enum", "const"}:
        return '("True" | "False")'
    return json_value(writer, parameter)


PYTHONIC = PythonicCalls("<|python_start|>", "<|python_end|>", bare=True).format()
LFM2 = PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>").format()
OLMO3 = PythonicCalls("<function_calls>", "</function_calls>", brackets=False).format()
