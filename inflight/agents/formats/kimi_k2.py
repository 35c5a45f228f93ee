"""Kimi K2. A call is named by its id, `functions.name:number`, which the model must get back with the result."""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import CallHeader, CallSections
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, RuleWriter, Tool
from inflight.agents.source import Markers, Reading, Source

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER_ENDS = Markers(_ARGUMENTS, _CALL[1], _SECTION[1])
_NUMBER = re.compile(r":\d+$")


def _header(source: Source) -> Reading[CallHeader | None]:
    text, ending = yield from source.text_until(_HEADER_ENDS)
    if ending != _ARGUMENTS:
        return None
    yield from source.skip_space()
    call_id = text.strip()
    return CallHeader(_NUMBER.sub("", call_id).removeprefix("functions."), call_id)


def _write(writer: RuleWriter, tools: Sequence[Tool], parallel: bool) -> str:
    ways = (
        f"{writer.marked(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {writer.marked(_ARGUMENTS)} {said}"
        for tool, said in writer.arguments(tools)
    )
    call = writer.rule("call", f"{writer.marked(_CALL[0])} ({' | '.join(ways)}) {writer.marked(_CALL[1])}")
    return f"{call} {f'(GAP {call})*' if parallel else ''} GAP {writer.marked(_SECTION[1])}"


# It thinks, too, and goes over to a call without ending its thoughts.
KIMI_K2 = ToolFormat(
    CallSections(_SECTION, _CALL, _header).read,
    (*_SECTION, *_CALL, _ARGUMENTS),
    CallGrammar(_SECTION[0], _write, repeats=False, never=(_CALL[0],)),
    ends_reasoning=(_SECTION[0],),
)
