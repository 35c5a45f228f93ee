"""Pythonic calls of Llama 3.2 and 4: a message consisting of `[name(key=value, ...), ...]`.

Only their shape or Llama 4's `<|python_start|>` marks them as calls. So they count only at the start of a message or
after that token, and only if they name one of the request's tools.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.formats.base import CallEmitter, ToolFormat
from inflight.agents.grammar_writer import (
    CallGrammar,
    GrammarWriter,
    Parameter,
    Tool,
    json_value,
    tool_parameters,
)
from inflight.agents.reading import Markers, Reading, Source
from inflight.agents.values import json_string, python_to_json, schema_types

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]*")
_IN_VALUE = re.compile(r"""[^,()\[\]{}'"]*""")
_IN_STRING = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


def _read_calls(source: Source, calls: CallEmitter, _: str) -> Reading[bool]:
    if not (yield from _read_call(source, calls, "[")):
        return False
    while (yield from _read_call(source, calls, ",")):
        pass
    yield from source.accept_after_space("]")
    yield from source.accept_after_space(_END)
    yield from source.skip_trailing_space()
    return True


def _read_call(source: Source, calls: CallEmitter, separator: str) -> Reading[bool]:
    """Read one call. Its first event is emitted once the name of its first argument is known."""
    source.hold()
    yield from source.skip_space()
    separated = yield from source.accept(separator)
    yield from source.skip_space()
    name = yield from source.take_while(_NAME)
    if not (separated and name and calls.may_call(name) and (yield from source.accept("("))):
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


def _write(writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
    alternatives = (
        f"{writer.terminals(f'{tool.name}(')} {_write_arguments(writer, parameters)} GAP {writer.terminals(')')}"
        for tool, parameters in zip(tools, tool_parameters(tools, _NAME), strict=True)
    )
    call = writer.rule("call", " | ".join(alternatives))
    more = f'(GAP "," GAP {call})*' if parallel else ""
    end = f"{writer.terminals(_END)}?" if writer.is_special(_END) else ""
    return f'GAP "[" GAP {call} {more} GAP "]" {end}'


def _write_arguments(writer: GrammarWriter, parameters: list[Parameter]) -> str:
    """Return an expression for the arguments in order, with commas between those that are present."""
    tail = ""  # what may follow the current parameter
    alternatives: list[str] = []  # to start the arguments
    for parameter in reversed(parameters):
        argument = f"{writer.terminals(f'{parameter.name}=')} {_write_value(writer, parameter)}"
        if parameter.required:
            alternatives.clear()
        alternatives.append(f"{argument} {tail}")
        next_argument = f'GAP "," GAP {argument}'
        tail = writer.rule(
            f"{parameter.rule}_tail",
            f"{next_argument if parameter.required else f'({next_argument})?'} {tail}",
        )
    optional = "" if any(parameter.required for parameter in parameters) else "?"
    return f"({' | '.join(alternatives)}){optional}" if alternatives else ""


def _write_value(writer: GrammarWriter, parameter: Parameter) -> str:
    """Return an expression for a value in JSON, which Python can read except for three words."""
    types = schema_types(parameter.schema)
    if types == {"boolean"} and not parameter.schema.keys() & {"enum", "const"}:
        return '("True" | "False")'
    return json_value(writer, parameter)


PYTHONIC = ToolFormat(
    (_START, _END),
    Markers(_START),
    _read_calls,
    CallGrammar(_START, _write, repeats_opening=False, bare_start="\\[", name_pattern=_NAME),
)
