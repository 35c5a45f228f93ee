"""Reading the tokens of a chat's answer, however they arrive."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from inflight.events import Delta, PositionLogprobs, RequestRecord, TokenLogprob, pack_logprobs
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import merge_deltas
from inflight.frontend.output_processor import Answer, ChatAnswers, OutputProcessor
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.outputs import Logprob, PackedLogprobs
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.checkpoints import write_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT_TEXT = f"<think>\nHm, well.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


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
def test_message_does_not_depend_on_chunking(
    tokenizer: Tokenizer, with_markers: Tokenizer, special: bool, cuts: list[int], look: bool
) -> None:
    used = with_markers if special else tokenizer
    ids = used.encode(CHAT_TEXT, add_special_tokens=False)
    answer = answer_of(used, ids, cuts, look)
    events = answer.take_events()
    assert answer.take_events() == []
    message = answer.message()
    assert (message.content, message.reasoning) == ("Let me see.", "Hm, well.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", '{"a": 1}')] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert all(call.id.startswith("call_") for call in message.tool_calls)
    assert answer.finish_reason == "tool_calls"
    assert merge_deltas(events) == events
    block, thoughts = CHAT_TEXT.partition("</think>")[0] + "</think>", "\nHm, well.\n"
    most, least = (len(used.encode(text, add_special_tokens=False)) for text in (block, thoughts))
    assert least <= answer.num_reasoning_tokens <= most
    whole = answer_of(used, ids, [])
    whole.complete()
    assert whole.num_reasoning_tokens == answer.num_reasoning_tokens


def test_special_tokens_other_than_markers_are_hidden(with_markers: Tokenizer) -> None:
    ids = with_markers.encode(f"One<hidden> two.\n{CALL}", add_special_tokens=False)
    assert answer_of(with_markers, ids, []).take_text() == f"One two.\n{CALL}"


def test_stop_string_ends_the_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>Hm</think>One two three.", add_special_tokens=False)
    answer = answer_of(tokenizer, ids, [*range(50)], stop=["two"])
    assert [event.text for event in answer.take_events()] == ["Hm", "One "]  # type: ignore[union-attr]
    assert answer.finish_reason == "stop"
    assert answer.message().content == "One "


def test_calls_beyond_the_limit_are_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CHAT_TEXT, add_special_tokens=False)
    answer = answer_of(tokenizer, ids, [], max_calls=1)
    answer.complete()
    assert len(answer.message().tool_calls) == 1


TEXT = "the quick brown fox — naïve, 12 and 345 €!"


def position(token_id: int) -> PositionLogprobs:
    return pack_logprobs([TokenLogprob(token_id, -0.5, 2), TokenLogprob(319, -0.25, 1)])


def assembler_for(
    tokenizer: Tokenizer | None, stop_ids: frozenset[int] = frozenset(), **fields: Any
) -> OutputProcessor:
    params = SamplingParams(max_tokens=100, **fields)
    names = ["r"] if params.n == 1 else [f"r/{index}" for index in range(params.n)]
    requests = [Request.create(name, [5, 6], params, 100, stop_ids=stop_ids) for name in names]
    return OutputProcessor("r", None, requests, tokenizer)


def last(reason: str, name: str = "r", stop_token_id: int | None = None) -> Delta:
    record = RequestRecord(name, "", 0, 2, finish_reason=reason, stop_token_id=stop_token_id)
    return Delta(name, [], finish_reason=reason, stop_token_id=stop_token_id, record=record)


def feed(output_processor: OutputProcessor, ids: list[int], cuts: list[int], look: bool) -> bool:
    """Push the ids in pieces, looking at the output between them or not. True if a stop string was found."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        if output_processor.push(Delta("r", ids[start:end])):
            return True
        if look:
            output_processor.output()
    return False


@given(cuts=st.lists(st.integers(0, 100), max_size=20), look=st.booleans())
def test_text_does_not_depend_on_chunking(tokenizer: Tokenizer, cuts: list[int], look: bool) -> None:
    output_processor = assembler_for(tokenizer)
    feed(output_processor, tokenizer.encode(TEXT), cuts, look)
    output_processor.push(last("length"))
    output = output_processor.output()
    assert output.outputs[0].text == TEXT
    assert output.finished
    assert output_processor.output().outputs[0].text == TEXT


@given(cuts=st.lists(st.integers(0, 100), max_size=20), look=st.booleans(), include=st.booleans())
def test_stop_string_is_found_for_any_chunking(
    tokenizer: Tokenizer, cuts: list[int], look: bool, include: bool
) -> None:
    ids = tokenizer.encode(TEXT)
    output_processor = assembler_for(tokenizer, stop=["345 €", "k b"], include_stop_str_in_output=include)
    assert feed(output_processor, ids, cuts, look)
    answer = output_processor.output().outputs[0]
    assert answer.text == ("the quick b" if include else "the quic")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "k b")
    # The answer's ids end with the token that completed the stop string.
    assert "k b" in tokenizer.decode(answer.token_ids)
    assert "k b" not in tokenizer.decode(answer.token_ids[:-1])
    assert not output_processor.push(Delta("r", [9]))
    assert not output_processor.push(last("abort"))
    assert output_processor.output().outputs[0] == answer


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_ignored_before_min_tokens(tokenizer: Tokenizer, include: bool) -> None:
    """A stop complete before min_tokens is text; one that ends in time counts, wherever it began."""
    ids = tokenizer.encode("xyz and xyz")
    sizes = [len(tokenizer.decode(ids[:count])) for count in range(len(ids) + 1)]
    second = next(count for count, size in enumerate(sizes) if size >= len("xyz and xyz"))
    for min_tokens in range(second + 1, 1, -1):
        output_processor = assembler_for(
            tokenizer, stop="xyz", min_tokens=min_tokens, include_stop_str_in_output=include
        )
        found = [output_processor.push(Delta("r", [token_id])) for token_id in ids]
        output_processor.push(last("length"))
        answer = output_processor.output().outputs[0]
        if min_tokens > second:
            assert not any(found)
            assert answer.text == "xyz and xyz"
        elif sizes[min_tokens - 1] >= 3:
            assert answer.text == ("xyz and xyz" if include else "xyz and ")
            assert answer.stop_reason == "xyz"


@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_text_of_a_stop_token_is_hidden(
    tokenizer: Tokenizer, stop: str | None, include: bool, late: bool
) -> None:
    """Also when the news of the end comes after the token, as under policies that keep finished requests."""
    ids = tokenizer.encode("the end")
    output_processor = assembler_for(
        tokenizer,
        frozenset({ids[-1]}),
        stop=stop,
        include_stop_str_in_output=include,
        stop_token_ids=[ids[-1]],
    )
    end = last("stop", stop_token_id=ids[-1])
    if late:
        output_processor.push(Delta("r", ids))
        output_processor.output()
    else:
        end.token_ids = ids
    output_processor.push(end)
    answer = output_processor.output().outputs[0]
    assert answer.token_ids == ids
    assert answer.text == tokenizer.decode(ids if include else ids[:-1])
    assert answer.stop_reason == ids[-1]


def test_end_of_text_token_is_not_a_stop_reason(tokenizer: Tokenizer) -> None:
    output_processor = assembler_for(tokenizer, frozenset({0, 9}), stop_token_ids=[9])
    end = last("stop", stop_token_id=0)
    end.token_ids = [20, 0]
    output_processor.push(end)
    answer = output_processor.output().outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_logprobs_have_text_and_a_sum(tokenizer: Tokenizer) -> None:
    output_processor = assembler_for(tokenizer, logprobs=1)
    ids = tokenizer.encode("the dog")
    for token_id in ids:
        output_processor.push(Delta("r", [token_id], [position(token_id)]))
    output_processor.push(last("length"))
    answer = output_processor.output().outputs[0]
    assert answer.cumulative_logprob == pytest.approx(-0.5 * len(ids))
    assert answer.logprobs is not None
    for token_id, found in zip(ids, answer.logprobs, strict=True):
        assert list(found) == [token_id, 319]
        assert (found[token_id].logprob, found[token_id].rank) == (-0.5, 2)
        assert found[token_id].decoded_token == tokenizer.decode([token_id], skip_special_tokens=False)


def test_logprobs_are_read_as_plain_lists_and_dicts(tokenizer: Tokenizer) -> None:
    output_processor = assembler_for(tokenizer, logprobs=1)
    output_processor.push(Delta("r", [20], [position(20)]))
    early = output_processor.output().outputs[0].logprobs
    output_processor.push(Delta("r", [319], [position(319)]))  # a token that is the most likely one too
    answer = output_processor.output().outputs[0]
    text = tokenizer.text_of
    expected = [
        {20: Logprob(-0.5, 2, text(20)), 319: Logprob(-0.25, 1, text(319))},
        {319: Logprob(-0.5, 2, text(319))},
    ]
    assert answer.logprobs == expected
    assert early is answer.logprobs
    assert (type(answer.logprobs), type(answer.logprobs[0])) == (list, dict)
    assert repr(expected) in repr(answer)
    for twin in (replace(answer), copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):
        assert twin == answer
        assert type(twin.logprobs) is list
    assert asdict(answer)["logprobs"][1] == {319: asdict(expected[1][319])}
    answer.logprobs = None
    assert answer.logprobs is None


def test_logprob_objects_are_made_only_when_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedLogprobs, "read", lambda _: pytest.fail("they were read"))
    output_processor = assembler_for(tokenizer, logprobs=1, prompt_logprobs=1, stop="never")
    ids = tokenizer.encode(TEXT)
    output_processor.push(Delta("r", ids, [position(i) for i in ids], prompt_logprobs=[None, position(5)]))
    output_processor.push(last("length"))
    assert output_processor.output().outputs[0].cumulative_logprob == -0.5 * len(ids)


def test_logprobs_are_cut_with_the_tokens(tokenizer: Tokenizer) -> None:
    output_processor = assembler_for(tokenizer, logprobs=1, stop="quick")
    ids = tokenizer.encode(TEXT)
    assert output_processor.push(Delta("r", ids, [position(token_id) for token_id in ids]))
    answer = output_processor.output().outputs[0]
    assert answer.logprobs is not None
    assert 0 < len(answer.logprobs) == len(answer.token_ids) < len(ids)
    assert answer.cumulative_logprob == pytest.approx(-0.5 * len(answer.token_ids))


def test_several_answers_end_independently(tokenizer: Tokenizer) -> None:
    output_processor = assembler_for(tokenizer, n=2)
    the, dog = tokenizer.encode("the"), tokenizer.encode("dog")
    output_processor.push(Delta("r/1", dog))
    output_processor.push(Delta("r/0", the))
    output_processor.push(last("length", "r/1"))
    output = output_processor.output()
    assert not output.finished
    assert [answer.finished() for answer in output.outputs] == [False, True]
    output_processor.push(last("length", "r/0"))
    output = output_processor.output()
    assert output.finished
    assert [answer.text for answer in output.outputs] == ["the", "dog"]


def test_error_is_part_of_the_output(tokenizer: Tokenizer) -> None:
    output_processor = assembler_for(tokenizer)
    end = last("error")
    end.error = "the logits are not finite"
    output_processor.push(Delta("r", tokenizer.encode("the")))
    output_processor.push(end)
    answer = output_processor.output().outputs[0]
    assert (answer.finish_reason, answer.error, answer.text) == ("error", "the logits are not finite", "the")


def test_without_a_tokenizer_there_are_only_ids() -> None:
    output_processor = assembler_for(None, logprobs=1)
    output_processor.push(Delta("r", [20], [position(20)]))
    output_processor.push(last("length"))
    answer = output_processor.output().outputs[0]
    assert (answer.text, answer.token_ids) == ("", [20])
    assert answer.logprobs is not None
    assert answer.logprobs[0][20].decoded_token is None


def test_incomplete_character_waits_for_its_remaining_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€")
    assert len(ids) > 1
    output_processor = assembler_for(tokenizer)
    output_processor.push(Delta("r", ids[:-1]))
    assert output_processor.output().outputs[0].text == ""
    output_processor.push(Delta("r", ids[-1:]))
    assert output_processor.output().outputs[0].text == "€"
    cut_off = assembler_for(tokenizer)
    cut_off.push(Delta("r", ids[:-1]))
    cut_off.push(last("length"))
    assert cut_off.output().outputs[0].text == "\ufffd"
