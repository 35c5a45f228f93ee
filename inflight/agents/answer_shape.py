"""The rules of an answer in which thoughts stand between markers and calls follow an opening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.agents.rule_writer import CallGrammar, RuleWriter, Tool
from inflight.agents.thinking import ThinkingMarkers
from inflight.errors import ParameterError


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What a request asks of its answer."""

    tools: Sequence[Tool]
    is_required: bool  # to call one
    parallel: bool  # several calls
    content: str | None  # the expression that it must match, None for free text
    max_reasoning_tokens: int | None


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
