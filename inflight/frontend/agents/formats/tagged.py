"""Calls whose arguments are bare text between tags, converted to JSON by the schemas of the parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from inflight.constraints.grammars import literal
from inflight.frontend.agents.formats.base import CallEmitter, ToolFormat
from inflight.frontend.agents.grammar_writer import (
    CallGrammar,
    GrammarWriter,
    Parameter,
    Tool,
    bare_value,
    may_be_text,
    parameter_sequence,
    tool_parameters,
)
from inflight.frontend.agents.source import Markers, Reading, Source
from inflight.frontend.agents.values import bare_text_to_json, json_string, schema_types

_NAME = re.compile(r"[^<>\n]*")
_QUOTED_NAME = re.compile(r'[^<>\n"]*')
# Reads text up to the first of some markers, which it returns; None at the end of the text.
ReadUntil = Callable[[Markers], Reading[str | None]]
_UNTAGGED_NAME = re.compile(r"[\w.\-]*")


@dataclass(frozen=True)
class TaggedCalls:
    """The tags of a format. White space between them has no meaning."""

    outer: tuple[str, str]  # around a call; ("", "") if there are none
    name: tuple[str, str]  # around the name of the function; ("", "") if it stands alone
    key: tuple[str, str]  # around the name of a parameter
    value: tuple[str, str]  # around its value
    end: str  # of a call, within the outer tags; "" if there is none
    several: bool = False  # calls may be within the outer tags
    lines: bool = False  # line breaks around a value are not part of it
    # The ends of a parameter's name that also tell the type of its value, instead of `key[1]`: first that of strings.
    typed_keys: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()  # that the tags consist of, where these may be special
    also: tuple[str, str] = ("", "")  # other outer tags, which an earlier model wrote
    verbatim: tuple[str, str] = ("", "")  # around a part of a value in which tags are text

    def format(self) -> ToolFormat:
        # Models sometimes omit the outer tags.
        openings = tuple(filter(None, (self.outer[0], self.name[0], self.also[0])))
        grammar = CallGrammar(
            openings[0],
            self.write,
            repeats_opening=not self.several,
            forbidden=openings[1:],
            name_pattern=self._name_pattern,
        )
        endings = tuple(filter(None, (self.end, self.outer[1], self.also[1])))
        return ToolFormat(self.tokens, Markers(*openings), self.read, endings, grammar)

    @property
    def _name_pattern(self) -> re.Pattern[str]:
        if not self.name[1].strip():
            return _UNTAGGED_NAME
        return _QUOTED_NAME if self.name[1].startswith('"') else _NAME

    @property
    def _key_pattern(self) -> re.Pattern[str]:
        return _QUOTED_NAME if self.key[1].startswith('"') else _NAME

    @property
    def _end_tag(self) -> str:
        """The tag that ends a call."""
        return self.end or self.outer[1]

    @property
    def _value_ends(self) -> tuple[str, ...]:
        """The ends of a value. Between lines, a value without an end tag ends at the next tag."""
        end = self.value[1]
        return (f"\n{end}", end, f"\n{self.key[0]}", f"\n{self.end}") if self.lines else (end,)

    def read(self, source: Source, calls: CallEmitter, opening: str) -> Reading[bool]:
        endings = Markers(*self._value_ends)
        if not (yield from self._read_call(source, calls, opening, endings)):
            return False
        while self.several and (yield from self._read_call(source, calls, "", endings)):
            pass
        return True

    def _read_call(self, source: Source, calls: CallEmitter, opening: str, endings: Markers) -> Reading[bool]:
        name = yield from self._read_name(source, opening)
        if not name:
            return False
        yield calls.begin(name)
        arguments = _TypedArguments(calls, name)
        while (yield from self._read_parameter(source, arguments, endings)):
            pass
        if (yield from source.accept_after_space(self._end_tag)):
            yield from arguments.end()
        else:
            yield from calls.end(complete=False)
        return True

    def _read_name(self, source: Source, opening: str) -> Reading[str]:
        source.hold()
        opened = bool(opening) and opening == self.name[0]
        if not opened:
            yield from source.skip_space()
            opened = not self.name[0] or (yield from source.accept(self.name[0])) is not None
        name = (yield from source.take_while(self._name_pattern)) if opened else ""
        closed = name and (yield from self.accept_name_end(source))
        if name.strip() and closed:
            source.release()
            return name.strip()
        source.rewind()
        return ""

    def accept_name_end(self, source: Source) -> Reading[bool]:
        if self.name[1].strip():
            return (yield from source.accept(self.name[1])) is not None
        # A name alone could be ordinary text.
        yield from source.skip_space()
        tag = yield from source.accept(self.key[0], self._end_tag)
        source.unread(len(tag or ""))
        return tag is not None

    def _read_parameter(self, source: Source, arguments: _TypedArguments, endings: Markers) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        if (yield from source.accept(self.key[0])) is None:
            source.rewind()
            return False
        key = (yield from source.take_while(self._key_pattern)).strip()
        key_end = yield from source.accept(*(self.typed_keys or (self.key[1],)))
        closed = key_end is not None
        if self.value[0]:
            yield from source.skip_space()
            closed = closed and (yield from source.accept(self.value[0])) is not None
        if not key or not closed:
            source.rewind()
            return False
        source.release()
        if self.lines:
            yield from source.accept("\n")
        is_string = bool(self.typed_keys) and key_end == self.typed_keys[0]
        ending = yield from arguments.read(source, key, partial(self._read_value, source, endings), is_string)
        if ending is not None and not ending.endswith(self.value[1]):
            source.unread(len(ending))
        return ending is not None

    def _read_value(self, source: Source, endings: Markers, read: ReadUntil) -> Reading[str | None]:
        """Read a value with `read`, and return its ending. White space between tags and a verbatim part has no
        meaning."""
        begin, end = self.verbatim
        if not begin:
            return (yield from read(endings))
        marker = yield from source.accept_after_space(begin)
        while marker in (None, begin):
            if marker == begin:
                if (yield from read(Markers(end))) is None:
                    return None
                marker = yield from source.accept_after_space(begin, *endings.texts)
            if marker is None and (marker := (yield from read(Markers(begin, *endings.texts)))) is None:
                return None
        return marker

    def write(self, writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
        line = "\n" if self.lines else ""

        def write_parameter(parameter: Parameter) -> str:
            ending, never = f"{line}{self.value[1]}", self._value_ends[2:]
            key_end = self.key[1]
            if self.typed_keys:
                key_end = self.typed_keys[schema_types(parameter.schema) != {"string"}]
            begin = writer.terminals(self.key[0], parameter.name, key_end, self.value[0], line)
            value = bare_value(writer, parameter, ending, tuple(filter(None, (*never, self.verbatim[0]))))
            if self.verbatim[0] and may_be_text(parameter):
                part = parameter._replace(rule=f"{parameter.rule}_verbatim")
                text = bare_value(writer, part, self.verbatim[1] + ending, (self.verbatim[1],))
                value = f"({value} | {writer.terminals(self.verbatim[0])} {text})"
            return f"{begin} {value} GAP"

        alternatives = (
            f"{writer.terminals(tool.name)} {self.write_name_end(writer)} GAP "
            f"{parameter_sequence(parameters, write_parameter)}"
            for tool, parameters in zip(tools, tool_parameters(tools, self._key_pattern), strict=True)
        )
        end = writer.terminals(self._end_tag)
        if not self.outer[0]:  # the opening is that of the name
            return f"({' | '.join(alternatives)}) {end}"
        call = writer.rule("call", f"{writer.terminals(self.name[0])} ({' | '.join(alternatives)}) {end}")
        calls = f"{call} (GAP {call})*" if self.several and parallel else call
        return f"GAP {calls}" + (f" GAP {writer.terminals(self.outer[1])}" if self.end else "")

    def write_name_end(self, writer: GrammarWriter) -> str:
        return writer.terminals(self.name[1])


class _KimiK3Calls(TaggedCalls):
    """`<|open|>call tool="name" index="1"<|sep|>` starts a call."""

    def accept_name_end(self, source: Source) -> Reading[bool]:
        if (yield from source.accept('" index="')):
            yield from source.take_while(_DIGITS)
        return (yield from source.accept('"<|sep|>')) is not None

    def write_name_end(self, writer: GrammarWriter) -> str:
        return " ".join((literal('" index="'), "/[0-9]{1,3}/", writer.terminals('"<|sep|>')))


class _TypedArguments:
    """The arguments of one call, written as bare text between tags and converted by their schemas."""

    def __init__(self, calls: CallEmitter, function: str) -> None:
        self._calls, self._function = calls, function
        self._before = "{"

    def read(
        self,
        source: Source,
        parameter: str,
        read_value: Callable[[ReadUntil], Reading[str | None]],
        is_string: bool = False,
    ) -> Reading[str | None]:
        """Read a value, and return its ending. A string is emitted as it arrives."""
        schema = {"type": "string"} if is_string else self._calls.schema(self._function, parameter)
        types = schema_types(schema)
        key = f"{self._before}{json_string(parameter)}: "
        self._before = ", "
        if types == {"string"}:
            yield self._calls.arguments(key + '"')
            ending = yield from read_value(
                lambda endings: source.emit_until(
                    endings, lambda text: self._calls.arguments(json_string(text)[1:-1])
                )
            )
            if ending is not None:
                yield self._calls.arguments('"')
            return ending
        parts: list[str] = []

        def take_until(endings: Markers) -> Reading[str | None]:
            text, ending = yield from source.take_until(endings)
            parts.append(text)
            return ending

        ending = yield from read_value(take_until)
        text = "".join(parts)
        yield self._calls.arguments(key + (text if ending is None else bare_text_to_json(text, types)))
        return ending

    def end(self) -> Reading[None]:
        yield self._calls.arguments("{}" if self._before == "{" else "}")
        yield from self._calls.end()


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
_DIGITS = re.compile(r"[0-9]*")
_K3_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_dsml = partial(
    TaggedCalls,
    name=('<｜DSML｜invoke name="', '">'),
    key=('<｜DSML｜parameter name="', '"'),
    value=("", "</｜DSML｜parameter>"),
    end="</｜DSML｜invoke>",
    several=True,
    typed_keys=('" string="true">', '" string="false">'),
    tokens=("｜DSML｜",),
)

QWEN3_CODER = TaggedCalls(
    outer=_TOOL_CALL,
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    lines=True,
    tokens=_TOOL_CALL,
).format()
SEED_OSS = TaggedCalls(
    outer=("<seed:tool_call>", "</seed:tool_call>"),
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    tokens=("<seed:tool_call>", "</seed:tool_call>"),
).format()
GLM45 = TaggedCalls(
    outer=_TOOL_CALL,
    name=("", ""),
    key=_KEY,
    value=_VALUE,
    end="",
    tokens=(*_TOOL_CALL, *_KEY, *_VALUE),
).format()
HY_V3 = TaggedCalls(
    outer=("<tool_calls>", "</tool_calls>"),
    name=("<tool_call>", "<tool_sep>"),
    key=_KEY,
    value=_VALUE,
    end="</tool_call>",
    several=True,
    tokens=("<tool_calls>", "</tool_calls>", "<tool_sep>", *_TOOL_CALL, *_KEY, *_VALUE),
).format()
MINIMAX_M2 = TaggedCalls(
    outer=("<minimax:tool_call>", "</minimax:tool_call>"),
    name=('<invoke name="', '">'),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    end="</invoke>",
    several=True,
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
).format()
DEEPSEEK_V32 = _dsml(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")).format()
DEEPSEEK_V4 = _dsml(
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    also=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
).format()
STEP3 = TaggedCalls(
    outer=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    name=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">'),
    key=('<steptml:parameter name="', '">'),
    value=("", "</steptml:parameter>"),
    end="</steptml:invoke><｜tool_call_end｜>",
    several=True,
    tokens=(
        *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
        "<｜tool_sep｜>",
    ),
).format()
SOLAR_OPEN2 = TaggedCalls(
    outer=("<|tool_call:start|>", "<|tool_call:end|>"),
    name=("", "\n"),
    key=("<|tool_arg:start|>", ""),
    value=("<|tool_arg:value|>", "<|tool_arg:end|>"),
    end="",
    tokens=(
        *("<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>"),
        "<|tool_arg:end|>",
    ),
).format()
MINICPM5 = TaggedCalls(
    outer=("", ""),
    name=('<function name="', '">'),
    key=('<param name="', '">'),
    value=("", "</param>"),
    end="</function>",
    verbatim=("<![CDATA[", "]]>"),
).format()
KIMI_K3 = _KimiK3Calls(
    outer=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    name=('<|open|>call tool="', '"'),
    key=('<|open|>argument key="', '"'),
    value=("", "<|close|>argument<|sep|>"),
    end="<|close|>call<|sep|>",
    several=True,
    typed_keys=tuple(f'" type="{name}"<|sep|>' for name in _K3_TYPES),
    tokens=("<|open|>", "<|close|>", "<|sep|>"),
).format()
