"""Calls that are JSON objects, `{"name": ..., "arguments": {...}}`, after a marker, alone or in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from inflight.constraints.grammars import literal
from inflight.frontend.agents.formats.base import CallEmitter, ToolFormat
from inflight.frontend.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.frontend.agents.source import Markers, Reading, Source
from inflight.frontend.agents.values import emit_string, emit_value, take_string, take_value

MAX_JSON_HEADER = 16_384  # characters: the arguments may come before the name
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "index", "tool_call_id")  # members that some models add


@dataclass(frozen=True)
class JsonCalls:
    """The text around JSON calls."""

    opening: str
    closing: str = ""
    separator: str = ""  # between the calls after one opening; "" if each has its own
    brackets: bool = False  # around these calls
    bare_start: str = ""  # see `CallGrammar`
    key: str = "arguments"  # that the model writes; both names are read
    others: tuple[tuple[str, str], ...] = ()  # other pairs of opening and closing that are read
    tokens: tuple[str, ...] = ()  # that the markers consist of; () if each is one
    repeats: bool = False  # models repeat the opening even where a separator could follow
    name_pattern: re.Pattern[str] | None = None

    def format(self) -> ToolFormat:
        openings, closings = zip((self.opening, self.closing), *self.others, strict=True)
        grammar = CallGrammar(
            self.opening,
            self.write,
            repeats_opening=self.repeats or not self.separator,
            bare_start=self.bare_start,
            forbidden=openings[1:],
            name_pattern=self.name_pattern,
        )
        endings = tuple(filter(None, dict.fromkeys(closings)))
        return ToolFormat(
            self.tokens or (*openings, *endings), Markers(*openings), self.read, endings, grammar
        )

    def read(self, source: Source, calls: CallEmitter, _: str = "") -> Reading[bool]:
        # The bracket separates the first call from what precedes it, as the separator does for the others.
        if not (yield from self.read_call(source, calls, "[" if self.brackets else "")):
            return False
        while self.separator and (yield from self.read_call(source, calls, self.separator)):
            pass
        if self.brackets:
            yield from source.accept_after_space("]")
        return True

    def read_call(self, source: Source, calls: CallEmitter, separator: str) -> Reading[bool]:
        # Without a marker, a call could be ordinary text.
        return (yield from read_json_call(source, calls, separator, only_known=bool(self.bare_start)))

    def write(self, writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
        call = self.write_call(writer, tools)
        separator = writer.terminals(self.separator)
        calls = f"{call} (GAP {separator} GAP {call})*" if parallel and separator else call
        if self.brackets:
            calls = f'"[" GAP {calls} GAP "]"'
        return f"GAP {calls}" + (f" GAP {writer.terminals(self.closing)}" if self.closing else "")

    def write_call(self, writer: GrammarWriter, tools: Sequence[Tool]) -> str:
        return writer.json_call(tools, self.key)


@dataclass(slots=True)
class _CallMembers:
    """The members of a call's object that precede its streamed arguments."""

    name: str | None = None
    id: str | None = None
    arguments: str | None = None  # if they came before the name
    closed: bool = False  # the object has ended


def read_json_call(
    source: Source, calls: CallEmitter, separator: str = "", only_known: bool = False
) -> Reading[bool]:
    """Read one call, after optional white space and separator. Return False, and read nothing, if there is none.

    With `only_known`, an object is a call only if it names one of the request's tools.
    """
    source.hold(MAX_JSON_HEADER)
    yield from source.skip_space()
    if separator and (yield from source.accept(separator)):
        yield from source.skip_space()
    members = yield from _take_members(source)
    if members is None or not members.name or (only_known and not calls.may_call(members.name)):
        source.rewind()
        return False
    source.release()
    yield calls.begin(members.name, members.id)
    if members.closed:
        if members.arguments is not None:
            inner = Source()
            inner.push(members.arguments)
            inner.end()
            yield from emit_arguments(inner, calls)
        yield from calls.end()
    else:
        complete = yield from emit_arguments(source, calls)
        yield from calls.end(complete)
        if complete:
            yield from _skip_remaining_members(source)
    return True


def emit_arguments(source: Source, calls: CallEmitter) -> Reading[bool]:
    """Emit the JSON text of a call's arguments. Return False if it is cut short."""
    character = yield from source.peek()
    if character == '"':  # JSON encoded as a JSON string
        return (yield from emit_string(source, calls.arguments))
    if character and character in "{[":
        return (yield from emit_value(source, calls.arguments))
    text = yield from take_value(source)
    if text and text not in ("null", "None"):
        yield calls.arguments(text)
    return bool(text)


def _take_members(source: Source) -> Reading[_CallMembers | None]:
    """Read up to the arguments of a call whose name is known, or to the end of the object."""
    members = _CallMembers()
    if not (yield from source.accept("{")):
        return None
    while True:
        yield from source.skip_space()
        key = yield from take_string(source)
        if key is None or not (yield from _accept_colon(source)):
            return None
        if key in _ARGUMENTS and members.name is not None:
            return members
        if not (yield from _take_member(source, members, key)):
            return None
        yield from source.skip_space()
        delimiter = yield from source.accept(",", "}")
        if delimiter is None:
            return None
        if delimiter == "}":
            members.closed = True
            return members


def _take_member(source: Source, members: _CallMembers, key: str) -> Reading[bool]:
    if key in _NAMES:
        members.name = yield from take_string(source)
        return members.name is not None
    if key == "id" and (yield from source.peek()) == '"':
        members.id = yield from take_string(source)
        return members.id is not None
    if key not in _ARGUMENTS and key not in _OTHERS:
        return False
    value = yield from take_value(source)
    if key in _ARGUMENTS:
        members.arguments = value
    return bool(value)


def _accept_colon(source: Source) -> Reading[bool]:
    yield from source.skip_space()
    colon = yield from source.accept(":")
    yield from source.skip_space()
    return colon is not None


def _skip_remaining_members(source: Source) -> Reading[None]:
    """Read the rest of an object after its arguments. Anything that does not continue the object is left unread."""
    while True:
        source.hold()
        yield from source.skip_space()
        delimiter = yield from source.accept(",", "}")
        if delimiter == ",":
            yield from source.skip_space()
            if (
                (yield from take_string(source))
                and (yield from _accept_colon(source))
                and (yield from take_value(source))
            ):
                source.release()
                continue
        if delimiter == "}":
            source.release()
        else:
            source.rewind()
        return


class _MistralCalls(JsonCalls):
    """Lists of calls and, in newer models, `[TOOL_CALLS]name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}` for each."""

    def read(self, source: Source, calls: CallEmitter, _: str = "") -> Reading[bool]:
        return (yield from self._read_named(source, calls)) or (yield from super().read(source, calls))

    def _read_named(self, source: Source, calls: CallEmitter) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        name = yield from source.take_while(_MISTRAL_NAME)
        call_id = None
        if (yield from source.accept(_MISTRAL_ID)):
            call_id = yield from source.take_while(_MISTRAL_NAME)
        marked = yield from source.accept(_MISTRAL_ARGUMENTS)
        yield from source.skip_space()
        if not name or not (marked or (yield from source.peek()) == "{"):
            source.rewind()
            return False
        source.release()
        yield calls.begin(name, call_id)
        complete = yield from emit_arguments(source, calls)
        yield from calls.end(complete)
        return True

    def write(self, writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
        if not writer.is_special(_MISTRAL_ARGUMENTS):  # an older model
            return super().write(writer, tools, parallel)
        alternatives = (
            f"{writer.terminals(tool.name, _MISTRAL_ARGUMENTS)} {arguments}"
            for tool, arguments in writer.arguments(tools)
        )
        return f"({' | '.join(alternatives)})"


class _CohereCalls(JsonCalls):
    """`{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}` for each call, numbered within an answer."""

    def write_call(self, writer: GrammarWriter, tools: Sequence[Tool]) -> str:
        before_number, before_name = literal('{"tool_call_id": "'), literal('", "tool_name": ')
        alternatives = (
            literal(f'{json.dumps(tool.name)}, "parameters": ') + f" {arguments}"
            for tool, arguments in writer.arguments(tools)
        )
        return writer.rule(
            "call", f'{before_number} /[0-9]{{1,3}}/ {before_name} ({" | ".join(alternatives)}) GAP "}}"'
        )


class _ApertusCalls(JsonCalls):
    """`{"name": {...}}` for each call."""

    def read_call(self, source: Source, calls: CallEmitter, separator: str) -> Reading[bool]:
        source.hold(MAX_JSON_HEADER)
        yield from source.skip_space()
        if (yield from source.accept(separator)):
            yield from source.skip_space()
        name = None
        if (yield from source.accept("{")):
            yield from source.skip_space()
            name = yield from take_string(source)
        if not name or not (yield from _accept_colon(source)) or (yield from source.peek()) != "{":
            source.rewind()
            return False
        source.release()
        yield calls.begin(name)
        complete = yield from emit_value(source, calls.arguments)
        yield from calls.end(complete)
        yield from source.accept_after_space("}")
        return True

    def write_call(self, writer: GrammarWriter, tools: Sequence[Tool]) -> str:
        alternatives = (
            f'{writer.terminals(json.dumps(tool.name))} ":" GAP {arguments}'
            for tool, arguments in writer.arguments(tools)
        )
        return writer.rule("call", f'"{{" GAP ({" | ".join(alternatives)}) GAP "}}"')


_MISTRAL_ID, _MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"[\w.\-]*")
_list = partial(JsonCalls, separator=",", brackets=True)

HERMES = JsonCalls("<tool_call>", "</tool_call>").format()
LONGCAT = JsonCalls("<longcat_tool_call>", "</longcat_tool_call>").format()
GRANITE_20B_FC = JsonCalls("<function_call>").format()
INTERNLM2 = JsonCalls(
    "<|action_start|><|plugin|>",
    "<|action_end|>",
    key="parameters",
    tokens=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
).format()
GIGACHAT3 = JsonCalls(
    "function call<|role_sep|>",
    others=(("<|message_sep|>\n\nfunction call<|role_sep|>", "<|message_sep|>"),),
    tokens=("<|role_sep|>", "<|message_sep|>"),
).format()
JAMBA = _list("<tool_calls>", "</tool_calls>").format()
NEMOTRON = _list("<TOOLCALL>", "</TOOLCALL>").format()
PHI4_MINI = JsonCalls("functools[", "]", separator=",").format()
GRANITE = _list("<|tool_call|>", bare_start="\\[", others=(("<tool_call>", ""),)).format()
# Without a marker, calls count only at the start of a message and if they name one of the request's tools.
LLAMA3_JSON = JsonCalls("<|python_tag|>", separator=";", bare_start="{", key="parameters").format()
XLAM = _list(
    "<tool_call>", "</tool_call>", bare_start="\\[", others=(("[TOOL_CALLS]", ""), ("```json", "```"))
).format()
APERTUS = _ApertusCalls("<|tools_prefix|>", "<|tools_suffix|>", separator=",", brackets=True).format()
COHERE_COMMAND = _CohereCalls("<|START_ACTION|>", "<|END_ACTION|>", separator=",", brackets=True).format()
MISTRAL = _MistralCalls(
    "[TOOL_CALLS]",
    separator=",",
    brackets=True,
    tokens=("[TOOL_CALLS]", _MISTRAL_ID, _MISTRAL_ARGUMENTS),
    repeats=True,
    name_pattern=_MISTRAL_NAME,
).format()
