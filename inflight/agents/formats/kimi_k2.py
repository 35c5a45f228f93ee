"""Kimi K2: a call starts with its id, `functions.name:number`, which must be sent back with the tool's result."""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.agents.calls import CallHeader, CallSections
from inflight.agents.formats.base import ToolFormat
from inflight.agents.grammar_writer import CallGrammar, GrammarWriter, Tool
from inflight.agents.source import Markers, Reading, Source

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER_ENDS = Markers(_ARGUMENTS, _CALL[1], _SECTION[1])
_NUMBER = re.compile(r":\d+$")


def _read_header(source: Source) -> Reading[CallHeader | None]:
    text, ending = yield from source.take_until(_HEADER_ENDS)
    if ending != _ARGUMENTS:
        return None
    yield from source.skip_space()
    call_id = text.strip()
    return CallHeader(_NUMBER.sub("", call_id).removeprefix("functions."), call_id)


def _write(writer: GrammarWriter, tools: Sequence[Tool], parallel: bool) -> str:
    alternatives = (
        f"{writer.terminals(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {writer.terminals(_ARGUMENTS)} {arguments}"
        for tool, arguments in writer.arguments(tools)
    )
    return writer.call_section(_CALL, _SECTION[1], alternatives, parallel)


# Models of this format may start a call without ending their reasoning.
KIMI_K2 = ToolFormat(
    CallSections(_SECTION, _CALL, _read_header).read,
    (*_SECTION, *_CALL, _ARGUMENTS),
    CallGrammar(_SECTION[0], _write, repeats_opening=False, forbidden=(_CALL[0],)),
    ends_reasoning=(_SECTION[0],),
)
