"""One grammar for everything that a request demands of its answer, reasoning and calls included.

[reasoning] [gap] calls                     a call is required
[reasoning] [gap] (calls | content)         constrained content, with tools that may be called instead
[reasoning] (text opening call)* text       whatever starts as a call continues as a valid one
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from inflight.constraints.answer_rules import CONTENT, RuleSchema
from inflight.constraints.grammars import literal
from inflight.constraints.schema_document import without_annotations
from inflight.errors import ParameterError
from inflight.frontend.agents.formats.base import (
    HARMONY_REASONING,
    REASONING_MARKERS,
    TOOL_FORMATS,
    ReasoningMarkers,
    ToolFormat,
    reasoning_format_name,
    tool_format_name,
)
from inflight.frontend.agents.formats.harmony import HARMONY, harmony_answer
from inflight.frontend.agents.grammar_writer import (
    ANY_OBJECT,
    INPUT_GRAMMAR,
    AnswerShape,
    CallGrammar,
    GrammarWriter,
    InputGrammar,
    Tool,
)
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.structured_outputs import MAX_CONSTRAINT_LENGTH, PARAM, StructuredOutputs


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def answer_grammar(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: ToolChoice = "auto",
    parallel: bool = True,
    content: StructuredOutputs | None = None,
    prompt: str = "",
    max_reasoning_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> StructuredOutputs | None:
    """Return one constraint for the whole answer, or None if nothing needs to be constrained.

    Formats, tools, tokenizer and prompt are those of `MessageParser`. With `tool_choice` "none" there are no tools.
    Raises ParameterError.
    """
    tool_format, reasoning_format = tool_format_name(tool_format), reasoning_format_name(reasoning_format)
    try:
        allowed = [] if tool_choice == "none" else read_tools(tools)
        if not isinstance(tool_choice, str):
            allowed = [tool for tool in allowed if tool.name == tool_choice.name]
        is_required = tool_choice not in ("auto", "none")
        needs_calls = bool(allowed) and (is_required or any(tool.strict for tool in allowed))
        is_content_all = content is None or (not allowed and reasoning_format is None)
        if not needs_calls and max_reasoning_tokens is None and is_content_all:
            return content

        def write(tools: Sequence[Tool]) -> str:
            writer = GrammarWriter(tokenizer, _markers(tool_format, reasoning_format))
            expression = None if content is None else _content(writer, content)
            shape = AnswerShape(tools, is_required, parallel, expression, max_reasoning_tokens)
            return writer.finish(_start(writer, shape, tool_format, reasoning_format, prompt)).text()

        text = write(allowed)
        if len(text) > MAX_CONSTRAINT_LENGTH and not needs_calls:  # valid arguments were not requested
            text = write([replace(tool, schema=ANY_OBJECT) for tool in allowed])
    except RecursionError:
        raise ParameterError("tools has a schema that is nested too deeply", param="tools") from None
    if len(text) > MAX_CONSTRAINT_LENGTH:
        param = "tools" if allowed else PARAM
        raise ParameterError(
            f"{param} would make a grammar of {len(text)} characters: at most {MAX_CONSTRAINT_LENGTH} are allowed "
            "where calls must match their schemas",
            param=param,
            code="constraint_too_complex",
        )
    return StructuredOutputs(answer=text)


def _markers(tool_format: str | None, reasoning_format: str | None) -> tuple[str, ...]:
    tools = HARMONY if reasoning_format == HARMONY_REASONING else ToolFormat()
    if tool_format is not None:
        tools = TOOL_FORMATS.get(tool_format)
    reasoning = REASONING_MARKERS.get(reasoning_format or "")
    return (*tools.markers, *(reasoning.markers if reasoning else ()))


def _start(
    writer: GrammarWriter,
    shape: AnswerShape,
    tool_format: str | None,
    reasoning_format: str | None,
    prompt: str,
) -> str:
    if HARMONY_REASONING in (tool_format, reasoning_format):
        return harmony_answer(writer, shape, HARMONY.opened_by(prompt))
    reasoning = None if reasoning_format is None else REASONING_MARKERS[reasoning_format]
    calls = None if tool_format is None else TOOL_FORMATS.get(tool_format).grammar
    opened = reasoning is not None and bool(reasoning.opened_by(prompt))
    return marker_answer(writer, shape, calls, reasoning, opened)


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools of a request. Their arguments are objects, whatever else the schemas say."""
    parsed = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        schema = function.get("parameters")
        if schema is None:  # the function has no parameters
            schema = {**ANY_OBJECT, "additionalProperties": False}
        is_strict = function.get("strict") is True
        param = f"tools[{index}].function.parameters"
        type_name = schema.get("type", "object") if isinstance(schema, dict) else None
        if type_name != "object" and not (isinstance(type_name, list) and "object" in type_name):
            if is_strict:
                raise ParameterError(f"{param} must be a schema of type object", param=param)
            schema = {}
        grammar = function.get(INPUT_GRAMMAR)
        parsed.append(
            Tool(
                function["name"],
                {**without_annotations(schema), **ANY_OBJECT},
                is_strict,
                param,
                grammar if isinstance(grammar, InputGrammar) else None,
            )
        )
    return parsed


def _content(writer: GrammarWriter, constraint: StructuredOutputs) -> str:
    """Return an expression for the content of an answer."""
    if constraint.kind == "json":
        try:
            schema = json.loads(constraint.text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{PARAM}.json is not valid JSON: {error}", param=PARAM) from None
        return writer.schema(CONTENT, RuleSchema(schema, PARAM))
    if constraint.kind == "json_object":
        return writer.schema(CONTENT, RuleSchema(ANY_OBJECT, PARAM))
    if constraint.kind == "choice":
        return writer.rule("CHOICE", " | ".join(map(literal, json.loads(constraint.text))))
    return writer.user_content(constraint.kind, constraint.text)


def marker_answer(
    writer: GrammarWriter,
    shape: AnswerShape,
    calls: CallGrammar | None,
    reasoning: ReasoningMarkers | None,
    opened: bool,
) -> str:
    """Return the grammar of an answer with reasoning between markers, and calls that follow an opening.

    `opened` says that the answer starts inside its reasoning.
    """
    if shape.tools and calls is None:
        raise ParameterError(
            "tools cannot be constrained: the format in which this model writes tool calls is unknown",
            param="tools",
            code="tools_unavailable",
        )
    for tool in shape.tools:
        if calls and calls.name_pattern is not None and not calls.name_pattern.fullmatch(tool.name):
            raise ParameterError(
                f"tools has a function named {tool.name!r}: this model's tool call format cannot express that name",
                param="tools",
            )
    # Constrained content has no leading white space, so white space before it belongs to the reasoning.
    gap = "GAP" if shape.content is not None and not shape.is_required else ""
    block = ""
    if reasoning:
        # Calls are read in reasoning too, but constrained only after it.
        never = (calls.opening, *calls.forbidden) if calls and shape.tools else ()
        block = _reasoning(writer, reasoning, opened, shape.max_reasoning_tokens, gap, never)
    # Text that starts with the opening marker would be parsed as reasoning.
    never_first = reasoning.opens if reasoning else ()
    if not shape.tools or calls is None:
        content = shape.content or writer.text("TEXT", never_first=never_first)
        return f"{block} {_marked_answer(writer, reasoning, content)}"
    after = writer.rule("calls", calls.write(writer, shape.tools, shape.parallel))
    only_calls = _calls_only(writer, calls, after, shape.parallel)
    if shape.is_required:
        body = f"GAP {only_calls}"
    elif shape.content is not None:
        body = f"({only_calls} | {_marked_answer(writer, reasoning, shape.content)})"
    elif calls.bare_start:
        body = _bare_calls_or_text(writer, calls, after)
    elif reasoning and reasoning.answer and writer.is_special(reasoning.answer[0]):
        text = writer.text("TEXT", (calls.opening, *calls.forbidden), never_first)
        body = f"({_marked_answer(writer, reasoning, text)})? ({only_calls})?"
    else:
        body = _text_and_calls(writer, calls, after, shape.parallel, never_first)
    return f"{block} {body}"


def _marked_answer(writer: GrammarWriter, reasoning: ReasoningMarkers | None, content: str) -> str:
    """Return the content, and the markers around it if there are special tokens for them."""
    if reasoning is None or not reasoning.answer or not writer.is_special(reasoning.answer[0]):
        return content
    before, after = map(writer.terminals, reasoning.answer[:2])
    return f"({before})? {content} ({after})?"


def _reasoning(
    writer: GrammarWriter,
    markers: ReasoningMarkers,
    opened: bool,
    limit: int | None,
    gap: str,
    never: Sequence[str],
) -> str:
    if limit == 0:
        return f"{writer.terminals(markers.close)} {gap}" if opened else ""
    never = (*never, *filter(None, markers.other))
    close_id = writer.token_id(markers.close)
    if limit is not None and close_id is None:
        raise ParameterError(
            f"max_reasoning_tokens is {limit}: it must be 0 for this model, because its end of reasoning "
            "is not a single token",
            param="max_reasoning_tokens",
            code="unsupported",
        )
    if limit is None or close_id is None:
        block = writer.text_until("reasoning", markers.close, never)
    else:
        text = writer.text("REASONING", (markers.close, *never))
        block = f"{writer.rule(f'reasoning[max_tokens={limit}]', text)} {writer.token(close_id)}"
    return f"{block} {gap}" if opened else f"({writer.terminals(markers.open)} {block} {gap})?"


def _calls_only(writer: GrammarWriter, calls: CallGrammar, after: str, parallel: bool) -> str:
    opening = writer.terminals(calls.opening)
    if calls.bare_start:
        return f"{opening}? {after} GAP" if writer.is_special(calls.opening) else f"{after} GAP"
    more = f"(GAP {opening} {after})* " if parallel and calls.repeats_opening else ""
    return f"{opening} {after} {more}GAP"


def _bare_calls_or_text(writer: GrammarWriter, calls: CallGrammar, after: str) -> str:
    """Allow a call at the start or after its token, and text that does not start like a call."""
    never = (calls.opening, *calls.forbidden)
    text = writer.rule("text", writer.text("TEXT", never, first=f"[^{calls.bare_start} \\t\\r\\n]"))
    if not writer.is_special(calls.opening):
        return f"({after} GAP | {text})?"
    return f"({after} GAP | {text}? ({writer.terminals(calls.opening)} {after} GAP)?)"


def _text_and_calls(
    writer: GrammarWriter, calls: CallGrammar, after: str, parallel: bool, never_first: Sequence[str]
) -> str:
    many = "*" if parallel else "?"
    before = writer.text_until("before", calls.opening, calls.forbidden, never_first)
    rest = writer.rule("rest", writer.text("REST", (calls.opening, *calls.forbidden), never_first))
    return f"({before} {after}){many} {rest}"
