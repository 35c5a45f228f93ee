"""Calls in a section between markers, each with a header, a separator and its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from inflight.frontend.agents.formats.base import CallEmitter, ToolFormat
from inflight.frontend.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.frontend.agents.source import Markers, Reading, Source


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The part of a call before its arguments."""

    name: str
    id: str | None = None


class CallSections:
    """The markers of a format, and how its headers are read and written."""

    def __init__(
        self,
        section: tuple[str, str],  # start and end markers
        call: tuple[str, str],
        separator: str,  # between header and arguments
        read_header: Callable[[Source, str], Reading[CallHeader]],  # gets the text before the separator
        # Returns the alternatives for a tool's arguments.
        write_call: Callable[[GrammarWriter, Tool, str], list[str]],
        *,
        fence: str = "",  # may surround the arguments, and so precede the end of a call
    ) -> None:
        self._section, self._call, self._separator = section, call, separator
        self._read_header, self._write_call = read_header, write_call
        self._header_ends = Markers(separator, call[1], section[1])
        line_breaks = product(("\n", ""), repeat=2) if fence else ()
        fenced = [f"{before}{fence}{after}{call[1]}" for before, after in line_breaks]
        self._endings = Markers(*fenced, call[1])

    def format(self, name_pattern: re.Pattern[str] | None = None) -> ToolFormat:
        opening, call = self._section[0], self._call[0]
        return ToolFormat(
            (*self._section, *self._call, self._separator),
            Markers(opening, call),  # models sometimes omit the section
            self._read,
            (self._section[1], self._call[1]),
            CallGrammar(
                opening, self._write, repeats_opening=False, forbidden=(call,), name_pattern=name_pattern
            ),
        )

    def _read(self, source: Source, calls: CallEmitter, opening: str) -> Reading[bool]:
        if not (yield from self._read_call(source, calls, opening == self._call[0])):
            return False
        while (yield from self._read_call(source, calls, False)):
            pass
        return True

    def _read_call(self, source: Source, calls: CallEmitter, opened: bool) -> Reading[bool]:
        source.hold()
        if not opened:
            yield from source.skip_space()
            opened = (yield from source.accept(self._call[0])) is not None
        header = None
        if opened:
            text, ending = yield from source.take_until(self._header_ends)
            if ending == self._separator:
                yield from source.skip_space()
                header = yield from self._read_header(source, text.strip())
        if header is None or not header.name:
            source.rewind()
            return False
        source.release()
        yield calls.begin(header.name, header.id)
        ending = yield from source.emit_until(self._endings, calls.arguments)
        yield from calls.end(ending is not None)
        return True

    def _write(self, writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
        alternatives = [
            alternative
            for tool, arguments in writer.arguments(tools)
            for alternative in self._write_call(writer, tool, arguments)
        ]
        opening, ending = map(writer.terminals, self._call)
        call = writer.rule("call", f"{opening} ({' | '.join(alternatives)}) {ending}")
        return f"{call} {f'(GAP {call})*' if parallel else ''} GAP {writer.terminals(self._section[1])}"


_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_NAME = re.compile(r"[^\n`{<]*")


def _read_deepseek_header(source: Source, text: str) -> Reading[CallHeader]:
    """Read on after `function<sep>`, as V3 and R1 write the name, and the arguments in a code fence."""
    if text == "function" and (yield from source.peek()) != "{":
        text = yield from source.take_while(_DEEPSEEK_NAME)
        yield from source.skip_space()
        yield from source.accept("```json")
        yield from source.skip_space()
    return CallHeader(text.strip())


def _write_deepseek_call(writer: GrammarWriter, tool: Tool, arguments: str) -> list[str]:
    """Allow both variants: the model knows which one is its own."""
    fence = writer.terminals("function", _DEEPSEEK_SEPARATOR, f"{tool.name}\n```json\n")
    return [
        f"{writer.terminals(tool.name, _DEEPSEEK_SEPARATOR)} {arguments}",
        f'{fence} {arguments} "\\n```"',
    ]


# The special tokens contain U+FF5C and U+2581 instead of `|` and `_`.
DEEPSEEK_V3 = CallSections(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    _DEEPSEEK_SEPARATOR,
    _read_deepseek_header,
    _write_deepseek_call,
    fence="```",
).format(_DEEPSEEK_NAME)


_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+):\d+", re.DOTALL)


def _read_kimi_header(_: Source, text: str) -> Reading[CallHeader]:
    """Read the call's id, `functions.name:number`, which must be sent back with the tool's result."""
    yield from ()
    call_id = _KIMI_ID.fullmatch(text)
    return CallHeader("" if call_id is None else call_id[1].strip(), text)


def _write_kimi_call(writer: GrammarWriter, tool: Tool, arguments: str) -> list[str]:
    name = writer.terminals(f"functions.{tool.name}:")
    return [f"{name} /[0-9]{{1,4}}/ {writer.terminals(_KIMI_SEPARATOR)} {arguments}"]


KIMI_K2 = CallSections(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    _KIMI_SEPARATOR,
    _read_kimi_header,
    _write_kimi_call,
).format()
