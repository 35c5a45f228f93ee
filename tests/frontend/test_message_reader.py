"""What is read from the tokens of a chat's answer, however they come."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from inflight.agents import MessageParser
from inflight.agents.events import merge_deltas
from inflight.events import Delta, RequestRecord
from inflight.frontend.output_processor import Answer, ChatAnswers, OutputProcessor
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.text import Tokenizer
from tests.support.checkpoints import write_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>\nHm, well.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def with_markers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that has special tokens for the markers."""
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("markers"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<hidden>"])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def answer_of(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], look: bool = False, **fields: Any
) -> Answer:
    """The answer with these tokens, which came in pieces."""
    max_calls = fields.pop("max_calls", None)
    params = SamplingParams(max_tokens=1000, **fields)
    chat = ChatAnswers(lambda: MessageParser("hermes", "think", tokenizer=tokenizer), max_calls)
    processor = OutputProcessor("r", "", [Request.create("r", [5, 6], params, 1000)], tokenizer, chat)
    (answer,) = processor.answers
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        if processor.push(Delta("r", ids[start:end])):
            break
        if look:
            answer.complete()
    record = RequestRecord("r", "", 0, 2, finish_reason="stop")
    processor.push(Delta("r", [], finish_reason="stop", record=record))
    return answer


@pytest.mark.parametrize("special", [False, True])
@given(cuts=st.lists(st.integers(0, 200), max_size=12), look=st.booleans())
def test_the_message_does_not_depend_on_the_pieces(
    tokenizer: Tokenizer, with_markers: Tokenizer, special: bool, cuts: list[int], look: bool
) -> None:
    used = with_markers if special else tokenizer
    ids = used.encode(TEXT, add_special_tokens=False)
    answer = answer_of(used, ids, cuts, look)
    assert answer.reader is not None
    events = answer.reader.take()
    assert answer.reader.take() == []
    message = answer.message()
    assert (message.content, message.reasoning) == ("Let me see.", "Hm, well.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", '{"a": 1}')] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert all(call.id.startswith("call_") for call in message.tool_calls)
    assert answer.reader.finish_reason == "tool_calls"
    assert merge_deltas(events) == events
    block, thoughts = TEXT.partition("</think>")[0] + "</think>", "\nHm, well.\n"
    most, least = (len(used.encode(text, add_special_tokens=False)) for text in (block, thoughts))
    assert least <= answer.reader.num_reasoning_tokens <= most
    whole = answer_of(used, ids, []).reader
    assert whole is not None
    whole.take()
    assert whole.num_reasoning_tokens == answer.reader.num_reasoning_tokens


def test_special_tokens_that_are_no_markers_stay_hidden(with_markers: Tokenizer) -> None:
    ids = with_markers.encode(f"One<hidden> two.\n{CALL}", add_special_tokens=False)
    assert answer_of(with_markers, ids, []).take_text() == f"One two.\n{CALL}"


def test_a_stop_string_ends_the_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>Hm</think>One two three.", add_special_tokens=False)
    answer = answer_of(tokenizer, ids, [*range(50)], stop=["two"])
    assert answer.reader is not None
    assert [event.text for event in answer.reader.take()] == ["Hm", "One "]  # type: ignore[union-attr]
    assert answer.reader.finish_reason == "stop"
    assert answer.message().content == "One "


def test_calls_beyond_the_first_are_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    answer = answer_of(tokenizer, ids, [], max_calls=1)
    answer.complete()
    assert len(answer.message().tool_calls) == 1
