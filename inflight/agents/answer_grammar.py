"""What an answer must look like, thoughts and calls included, as one grammar.

[thoughts] [gap] calls                      a call is required
[thoughts] [gap] (calls | content)          content of a shape, and tools that may be called instead
[thoughts] (text opening call)* text        whatever begins as a call goes on as a valid one
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from inflight.agents.formats.base import HARMONY_REASONING, THINKING, TOOL_FORMATS, ThinkingMarkers
from inflight.agents.formats.harmony import HARMONY, harmony_answer
from inflight.agents.grammar_writer import ANY_OBJECT, AnswerShape, CallGrammar, RuleWriter, Tool
from inflight.constraints import CONTENT, RuleSchema, literal, without_annotations
from inflight.errors import ParameterError
from inflight.structured_outputs import MAX_CONSTRAINT_LENGTH, PARAM, StructuredOutputs
from inflight.text import Tokenizer


class NamesTool(Protocol):
    """A choice of one tool."""

    @property
    def name(self) -> str: ...


def answer_grammar(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | NamesTool = "auto",
    parallel: bool = True,
    content: StructuredOutputs | None = None,
    prompt: str = "",
    max_reasoning_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> StructuredOutputs | None:
    """One constraint for all that a request asks of its answer; None where nothing needs any.

    Formats, tools, tokenizer and prompt as `MessageParser` has them. With `tool_choice` "none" there are no tools.
    Raises ParameterError.
    """
    try:
        offered = [] if tool_choice == "none" else read_tools(tools)
        if not isinstance(tool_choice, str):
            offered = [tool for tool in offered if tool.name == tool_choice.name]
        is_required = tool_choice not in ("auto", "none")
        needs_calls = bool(offered) and (is_required or any(tool.strict for tool in offered))
        is_content_all = content is None or (not offered and reasoning_format is None)
        if not needs_calls and max_reasoning_tokens is None and is_content_all:
            return content

        def written(tools: Sequence[Tool]) -> str:
            writer = RuleWriter(tokenizer)
            wanted = None if content is None else _content(writer, content)
            shape = AnswerShape(tools, is_required, parallel, wanted, max_reasoning_tokens)
            return writer.answer(_start(writer, shape, tool_format, reasoning_format, prompt)).text()

        text = written(offered)
        if len(text) > MAX_CONSTRAINT_LENGTH and not needs_calls:  # nobody asked for valid arguments
            text = written([replace(tool, schema=ANY_OBJECT) for tool in offered])
    except RecursionError:
        raise ParameterError("tools has a schema that is nested too deeply", param="tools") from None
    if len(text) > MAX_CONSTRAINT_LENGTH:
        param = "tools" if offered else PARAM
        raise ParameterError(
            f"{param} would make a grammar of {len(text)} characters: at most {MAX_CONSTRAINT_LENGTH} are allowed "
            "where calls must match their schemas",
            param=param,
            code="constraint_too_complex",
        )
    return StructuredOutputs(answer=text)


def _start(
    writer: RuleWriter, shape: AnswerShape, tool_format: str | None, reasoning_format: str | None, prompt: str
) -> str:
    if HARMONY_REASONING in (tool_format, reasoning_format):
        return harmony_answer(writer, shape, HARMONY.opened(prompt))
    thinking = None if reasoning_format is None else THINKING[reasoning_format]
    calls = None if tool_format is None else TOOL_FORMATS.get(tool_format).grammar
    opened = thinking is not None and bool(thinking.opened(prompt))
    return marked_answer(writer, shape, calls, thinking, opened)


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools as requests have them. Their arguments are objects, whatever else the schemas say."""
    found = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        schema = function.get("parameters")
        if schema is None:  # it takes none
            schema = {**ANY_OBJECT, "additionalProperties": False}
        is_strict = function.get("strict") is True
        param = f"tools[{index}].function.parameters"
        kind = schema.get("type", "object") if isinstance(schema, dict) else None
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            if is_strict:
                raise ParameterError(f"{param} must be a schema of type object", param=param)
            schema = {}
        found.append(Tool(function["name"], {**without_annotations(schema), **ANY_OBJECT}, is_strict, param))
    return found


def _content(writer: RuleWriter, asked: StructuredOutputs) -> str:
    """What the content of an answer must be, as an expression."""
    if asked.kind == "json":
        try:
            schema = json.loads(asked.text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{PARAM}.json is no JSON: {error}", param=PARAM) from None
        return writer.schema(CONTENT, RuleSchema(schema, PARAM))
    if asked.kind == "json_object":
        return writer.schema(CONTENT, RuleSchema(ANY_OBJECT, PARAM))
    if asked.kind == "choice":
        return writer.rule("CHOICE", " | ".join(map(literal, json.loads(asked.text))))
    return writer.user_content(asked.kind, asked.text)


def marked_answer(
    writer: RuleWriter,
    shape: AnswerShape,
    calls: CallGrammar | None,
    thinking: ThinkingMarkers | None,
    opened: bool,
) -> str:
    """`opened`: the answer begins inside its thoughts."""
    if shape.tools and calls is None:
        raise ParameterError(
            "tools are given: it is not known how this model writes calls, so they cannot be constrained",
            param="tools",
            code="tools_unavailable",
        )
    for tool in shape.tools:
        if calls is not None and calls.names is not None and not calls.names.fullmatch(tool.name):
            raise ParameterError(
                f"tools has a function named {tool.name!r}: this model cannot write such a name",
                param="tools",
            )
    # Content has no white space of its own, so what stands before it belongs to the thoughts.
    gap = "GAP" if shape.content is not None and not shape.is_required else ""
    thoughts = _thoughts(writer, thinking, opened, shape.max_reasoning_tokens, gap) if thinking else ""
    # What looks like thoughts would be read as such.
    never_first = (thinking.open,) if thinking else ()
    if shape.tools and calls is not None:
        after = writer.rule("calls", calls.write(writer, shape.tools, shape.parallel))
        if shape.is_required:
            body = f"GAP {_calls_only(writer, calls, after, shape.parallel)}"
        elif shape.content is not None:
            body = f"({_calls_only(writer, calls, after, shape.parallel)} | {shape.content})"
        elif calls.bare:
            body = _bare_calls_or_text(writer, calls, after)
        else:
            body = _text_and_calls(writer, calls, after, shape.parallel, never_first)
    elif shape.content is not None:
        body = shape.content
    else:
        body = writer.text("TEXT", never_first=never_first)
    return f"{thoughts} {body}"


def _thoughts(
    writer: RuleWriter, thinking: ThinkingMarkers, opened: bool, limit: int | None, gap: str
) -> str:
    if limit == 0:
        return f"{writer.marked(thinking.close)} {gap}" if opened else ""
    close_id = writer.token_id(thinking.close)
    if limit is not None and close_id is None:
        raise ParameterError(
            f"max_reasoning_tokens is {limit}: it must be 0 with this model, whose end of reasoning is no single token",
            param="max_reasoning_tokens",
            code="unsupported",
        )
    if close_id is not None and (limit is not None or writer.is_special(thinking.close)):
        name = "thoughts" if limit is None else f"thoughts[max_tokens={limit}]"
        said = writer.rule(name, writer.text("THOUGHTS", never=(thinking.close,)))
        block = f"{said} {writer.token(close_id)}"
    else:
        block = writer.rule("thoughts[lazy]", f"{writer.text('THOUGHTS')} {writer.marked(thinking.close)}")
    return f"{block} {gap}" if opened else f"({writer.marked(thinking.open)} {block} {gap})?"


def _calls_only(writer: RuleWriter, calls: CallGrammar, after: str, parallel: bool) -> str:
    opening = writer.marked(calls.opening)
    if calls.bare:
        return f"{opening}? {after} GAP" if writer.is_special(calls.opening) else f"{after} GAP"
    more = f"(GAP {opening} {after})* " if parallel and calls.repeats else ""
    return f"{opening} {after} {more}GAP"


def _bare_calls_or_text(writer: RuleWriter, calls: CallGrammar, after: str) -> str:
    """A call at the beginning or after its token. Text must not begin as calls do."""
    text = writer.rule("text", f"/[^{calls.bare} \\t\\r\\n](?s:.*)/")
    if not writer.is_special(calls.opening):
        return f"({after} GAP | {text})?"
    return f"({after} GAP | {text}? ({writer.marked(calls.opening)} {after} GAP)?)"


def _text_and_calls(
    writer: RuleWriter, calls: CallGrammar, after: str, parallel: bool, never_first: Sequence[str]
) -> str:
    text = writer.text("TEXT", calls.never, never_first)
    many = "*" if parallel else "?"
    if writer.is_special(calls.opening):
        rest = writer.rule("rest", text)
        return f"({rest} {writer.marked(calls.opening)} {after}){many} {rest}"
    head = writer.rule("head[lazy]", f"{text} {writer.marked(calls.opening)}")
    rest = writer.rule("rest", writer.text("REST", (calls.opening, *calls.never), never_first))
    return f"({head} {after}){many} {rest}"
