"""DeepSeek V3, R1 and V3.1, whose special tokens are written with a wide bar and a low block.

V3 and R1 write `function<sep>name` and the arguments in a fence, V3.1 `name<sep>` and the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import CallHeader, CallSections
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, RuleWriter, Tool
from inflight.agents.source import Markers, Reading, Source

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_HEADER_ENDS = Markers(_SEPARATOR, _CALL[1], _SECTION[1])
_NAME = re.compile(r"[^\n`{<]*")


def _header(source: Source) -> Reading[CallHeader | None]:
    name, ending = yield from source.text_until(_HEADER_ENDS)
    if ending != _SEPARATOR:
        return None
    yield from source.skip_space()
    if name.strip() == "function" and (yield from source.peek()) != "{":
        name = yield from source.take_while(_NAME)
        yield from source.skip_space()
        yield from source.accept("```json")
        yield from source.skip_space()
    return CallHeader(name.strip())


def _write(writer: RuleWriter, tools: Sequence[Tool], parallel: bool) -> str:
    """Both ways: a model knows its own."""
    ways = []
    for tool, arguments in writer.arguments(tools):
        ways.append(f"{writer.marked(tool.name, _SEPARATOR)} {arguments}")
        fence = writer.marked("function", _SEPARATOR, f"{tool.name}\n```json\n")
        ways.append(f'{fence} {arguments} "\\n```"')
    call = writer.rule("call", f"{writer.marked(_CALL[0])} ({' | '.join(ways)}) {writer.marked(_CALL[1])}")
    return f"{call} {f'(GAP {call})*' if parallel else ''} GAP {writer.marked(_SECTION[1])}"


DEEPSEEK_V3 = ToolFormat(
    CallSections(_SECTION, _CALL, _header, fence="```").read,
    (*_SECTION, *_CALL, _SEPARATOR),
    CallGrammar(_SECTION[0], _write, repeats=False, never=(_CALL[0],), names=_NAME),
)
