"""How an answer on harmony's channels is written: thoughts on `analysis`, then a call, or the `final` answer."""

from __future__ import annotations

from inflight.agents.answer_shape import AnswerShape
from inflight.agents.rule_writer import RuleWriter
from inflight.errors import ParameterError

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CONSTRAIN, _CALL = "<|constrain|>", "<|call|>"


def harmony_answer(writer: RuleWriter, shape: AnswerShape, opened: str) -> str:
    """`opened` is the header of a message that the prompt has begun."""
    if not all(map(writer.is_special, (_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN, _CALL))):
        raise ParameterError(
            "the tokenizer of this model lacks tokens of harmony, so its answers cannot be constrained",
            code="constraints_unavailable",
        )
    text = writer.text("TEXT")
    if opened and "analysis" not in opened:  # it is in its last message already
        return shape.content or text
    limit = shape.max_reasoning_tokens
    next_message = writer.marked(_END, _START, "assistant")
    said = writer.rule("thoughts" if not limit else f"thoughts[max_tokens={limit}]", text)
    thought = f"{writer.marked(_CHANNEL, 'analysis', _MESSAGE)} {said} {next_message}"
    # A limit is one message's, so with one there is but one.
    many = "*" if limit is None else "?"
    thoughts = "" if limit == 0 else f"({thought}){many}"
    last = writer.rule("last", _last_message(writer, shape, text))
    if opened:
        rest = next_message if limit == 0 else f"{said} {next_message}"
        return f"{rest} {thoughts if limit is None else ''} {last}"
    return f"{thoughts} {last}"


def _last_message(writer: RuleWriter, shape: AnswerShape, text: str) -> str:
    final = f"{writer.marked(_CHANNEL, 'final', _MESSAGE)} {shape.content or text}"
    if not shape.tools:
        return final
    to_function = writer.marked(_CHANNEL, "commentary to=functions.")
    begin_arguments = writer.marked(_CONSTRAIN, "json", _MESSAGE)
    ways = " | ".join(
        f'{writer.marked(tool.name)} " "? {begin_arguments} {arguments}'
        for tool, arguments in writer.arguments(tools=shape.tools)
    )
    call = f"{to_function} ({ways}) {writer.marked(_CALL)}?"
    if shape.is_required:
        return call
    if shape.content is not None:
        return f"{call} | {final}"
    words = (
        f"{writer.marked(_CHANNEL, 'commentary', _MESSAGE)} {text} {writer.marked(_END, _START, 'assistant')}"
    )
    return f"({words})? {call} | {final}"
