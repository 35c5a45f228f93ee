"""DeepSeek V3, R1 and V3.1, whose special tokens contain U+FF5C and U+2581 instead of `|` and `_`.

V3 and R1 write `function<sep>name` and the arguments in a code fence, V3.1 writes `name<sep>` and the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import CallHeader, CallSections
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.agents.source import Markers, Reading, Source

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_HEADER_ENDS = Markers(_SEPARATOR, _CALL[1], _SECTION[1])
_NAME = re.compile(r"[^\n`{<]*")


def _read_header(source: Source) -> Reading[CallHeader | None]:
    name, ending = yield from source.take_until(_HEADER_ENDS)
    if ending != _SEPARATOR:
        return None
    yield from source.skip_space()
    if name.strip() == "function" and (yield from source.peek()) != "{":
        name = yield from source.take_while(_NAME)
        yield from source.skip_space()
        yield from source.accept("```json")
        yield from source.skip_space()
    return CallHeader(name.strip())


def _write(writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
    """Allow both variants: the model knows which one is its own."""
    alternatives = []
    for tool, arguments in writer.arguments(tools):
        alternatives.append(f"{writer.terminals(tool.name, _SEPARATOR)} {arguments}")
        fence = writer.terminals("function", _SEPARATOR, f"{tool.name}\n```json\n")
        alternatives.append(f'{fence} {arguments} "\\n```"')
    return writer.call_section(_CALL, _SECTION[1], alternatives, parallel)


DEEPSEEK_V3 = ToolFormat(
    CallSections(_SECTION, _CALL, _read_header, fence="```").read,
    (*_SECTION, *_CALL, _SEPARATOR),
    CallGrammar(_SECTION[0], _write, repeats_opening=False, forbidden=(_CALL[0],), name_pattern=_NAME),
)
