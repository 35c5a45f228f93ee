"""Pythonic calls of Llama 3.2 and 4: a message that is `[name(key=value, ...), ...]`.

Nothing marks them but their shape, or Llama 4's `<|python_start|>`. So they count only at the beginning of a message or
after that token, and only if they name a tool that there is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, Parameter, RuleWriter, Tool, json_value, parameters
from inflight.agents.source import Markers, Reading, Source
from inflight.agents.values import json_string, literal_json, types_of

_START, _END = "<|python_start|>", "<|python_end|>"
_STARTS = Markers(_START)
_NAME = re.compile(r"[\w.\-]*")
_IN_VALUE = re.compile(r"""[^,()\[\]{}'"]*""")
_IN_STRING = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


def read(source: Source, calls: Calls) -> Reading[None]:
    yield from _read_calls(source, calls)
    while (start := (yield from source.until(_STARTS, ContentDelta, trim=True))) is not None:
        if not (yield from _read_calls(source, calls)):
            yield ContentDelta(start)


def _read_calls(source: Source, calls: Calls) -> Reading[bool]:
    if not (yield from _read_call(source, calls, "[")):
        return False
    while (yield from _read_call(source, calls, ",")):
        pass
    yield from source.accept_after_space("]")
    yield from source.accept_after_space(_END)
    yield from source.skip_last_space()
    return True


def _read_call(source: Source, calls: Calls, separator: str) -> Reading[bool]:
    """A call begins once its first argument has shown to have a name."""
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
    key = "" if closed else (yield from _key(source))
    if not key and not closed:
        source.rewind()
        return False
    source.release()
    yield calls.begin(name)
    complete = closed or (yield from _read_arguments(source, calls, key))
    yield from calls.end(complete)
    return True


def _read_arguments(source: Source, calls: Calls, key: str) -> Reading[bool]:
    """Values and further keys, up to the bracket. False where something else comes first."""
    before = "{"
    while True:
        value, ending = yield from _value(source)
        said = value if ending is None else literal_json(value) or json_string(value)
        yield calls.arguments(f"{before}{json_string(key)}: {said}")
        if ending is None:
            return False
        if ending == ",":
            before = ", "
            source.hold()
            key = yield from _key(source)
            if key:
                source.release()
                continue
            source.rewind()
            if not (yield from source.accept_after_space(")")):
                return False
        yield calls.arguments("}")
        return True


def _key(source: Source) -> Reading[str]:
    """The name before an equals sign; "" where there is none."""
    yield from source.skip_space()
    key = yield from source.take_while(_NAME)
    yield from source.skip_space()
    return key if key and (yield from source.accept("=")) else ""


def _value(source: Source) -> Reading[tuple[str, str | None]]:
    """The text of a value, and the comma or bracket after it; None where the text ends first."""
    parts = []
    depth = 0
    while True:
        parts.append((yield from source.take_while(_IN_VALUE)))
        sign = yield from source.peek()
        if not sign:
            return "".join(parts).strip(), None
        source.take(1)
        if depth == 0 and sign in ",)":
            return "".join(parts).strip(), sign
        parts.append(sign)
        if sign in "'\"":
            parts.append((yield from _string(source, sign)))
        elif sign != ",":
            depth = depth + 1 if sign in "([{" else max(depth - 1, 0)


def _string(source: Source, quote: str) -> Reading[str]:
    """The rest of a string, with its quote."""
    parts = []
    while True:
        parts.append((yield from source.take_while(_IN_STRING[quote])))
        sign = yield from source.peek()
        parts.append(source.take(len(sign)))
        if sign == "\\":
            parts.append(source.take(len((yield from source.peek()))))
        else:
            return "".join(parts)


def _write(writer: RuleWriter, tools: Sequence[Tool], parallel: bool) -> str:
    ways = (
        f"{writer.marked(f'{tool.name}(')} {_written_arguments(writer, given)} GAP {writer.marked(')')}"
        for tool, given in zip(tools, parameters(tools, _NAME), strict=True)
    )
    call = writer.rule("call", " | ".join(ways))
    more = f'(GAP "," GAP {call})*' if parallel else ""
    end = f"{writer.marked(_END)}?" if writer.is_special(_END) else ""
    return f'GAP "[" GAP {call} {more} GAP "]" {end}'


def _written_arguments(writer: RuleWriter, given: list[Parameter]) -> str:
    """In their order, with commas between those that are there."""
    tail = ""  # what may come behind the parameter that is looked at
    ways: list[str] = []  # to begin
    for parameter in reversed(given):
        said = f"{writer.marked(f'{parameter.name}=')} {_written_value(writer, parameter)}"
        if parameter.required:
            ways.clear()
        ways.append(f"{said} {tail}")
        further = f'GAP "," GAP {said}'
        tail = writer.rule(
            f"{parameter.rule}_tail", f"{further if parameter.required else f'({further})?'} {tail}"
        )
    optional = "" if any(parameter.required for parameter in given) else "?"
    return f"({' | '.join(ways)}){optional}" if ways else ""


def _written_value(writer: RuleWriter, parameter: Parameter) -> str:
    """JSON, which Python reads too but for three words."""
    types = types_of(parameter.schema)
    if types == {"boolean"} and not parameter.schema.keys() & {"enum", "const"}:
        return '("True" | "False")'
    return json_value(writer, parameter)


PYTHONIC = ToolFormat(
    read, (_START, _END), CallGrammar(_START, _write, repeats=False, bare="\\[", names=_NAME)
)
