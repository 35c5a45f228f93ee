"""Messages survive the wire unchanged, and what is no message is dropped."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import errors
from inflight.engine.client import Command, ModelFacts, RequestState
from inflight.engine.remote.wire import (
    COMMAND_MESSAGES,
    LARGEST,
    Abort,
    Ack,
    CommandMessage,
    FromEngine,
    Heartbeat,
    Ready,
    Reply,
    RunCommand,
    Start,
    StepOutputs,
    ToEngine,
    encode_add,
)
from inflight.engine.stats import EngineStats
from inflight.errors import EngineError, InflightError, RequestError
from inflight.events import (
    Delta,
    KVUsage,
    RequestRecord,
    TimeBreakdown,
    TokenLogprob,
    pack_logprobs,
)
from inflight.processes.channel import SECRET_LENGTH, Codec, RemoteError, Stop, Unreadable
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request

SECRET = b"s" * SECRET_LENGTH
TO_ENGINE: Codec[Any] = Codec(SECRET, ToEngine)
TO_CLIENT: Codec[Any] = Codec(SECRET, FromEngine)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, LARGEST)
ids = st.integers(0, 2**31)
id_lists = st.lists(ids, max_size=5)
times = st.floats(allow_nan=False)
positions = st.lists(
    st.builds(TokenLogprob, st.integers(0, 2**31 - 1), st.floats(width=32), st.integers(1, 2**31 - 1)),
    min_size=1,
    max_size=3,
).map(pack_logprobs)
reasons = st.none() | st.sampled_from(["stop", "length", "abort", "error"])
breakdowns = st.builds(TimeBreakdown, st.dictionaries(texts, times, max_size=2), *[times] * 5)
records = st.builds(
    RequestRecord, texts, texts, st.integers(-(2**31), 2**31), counts, times, *[st.none() | times] * 4,
    counts, counts, counts, reasons, st.none() | ids, breakdowns,
)  # fmt: skip
usages = st.builds(KVUsage, *[counts] * 6)
stats = st.builds(EngineStats, *[counts] * 9, usages)
deltas = st.builds(
    Delta, texts, id_lists, st.none() | st.lists(positions, max_size=3),
    st.none() | st.lists(st.none() | positions, max_size=3), reasons, st.none() | ids, *[st.none() | texts] * 2,
    st.none() | records,
)  # fmt: skip
names = st.lists(texts, max_size=3).map(tuple)
states = st.builds(
    RequestState, records, st.sampled_from(["waiting", "running", "finished"]), *[counts] * 3, names, counts
)
problems = st.builds(RemoteError, texts, texts, st.lists(texts, max_size=2))
replies = st.builds(Reply, counts, counts, st.none() | states, st.none() | problems)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    fraction = st.floats(0.001, 1)
    max_tokens = draw(st.none() | st.integers(1, LARGEST))
    return SamplingParams(
        n=draw(st.integers(1, 128)),
        temperature=draw(st.floats(0, 1e9) | st.integers(0, 5)),
        top_p=draw(fraction),
        top_k=draw(st.integers(-1, LARGEST)),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(fraction),
        seed=draw(st.none() | st.integers(-(2**63), 2**64 - 1)),
        stop=draw(st.none() | texts.filter(bool) | st.lists(texts.filter(bool), max_size=3)),
        stop_token_ids=draw(st.none() | id_lists),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 100)),
        logprobs=draw(st.none() | st.integers(0, 100)),
        prompt_logprobs=draw(st.none() | st.integers(0, 100)),
        skip_special_tokens=draw(st.booleans()),
        logit_bias=draw(st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=3)),
        bad_words=draw(st.none() | st.lists(texts.filter(bool), max_size=3)),
    )


def round_trip(codec: Codec[Any], message: Any) -> Any:
    return codec.decode(bytes(codec.encode(message)))


def sent(request: Request) -> Any:
    """The message that a request arrives in."""
    return TO_ENGINE.decode(bytes(encode_add(TO_ENGINE, 7, request)))


# ---- round trips ----


@given(sampling_params(), st.data())
def test_every_request_survives_the_wire(params: SamplingParams, data: st.DataObject) -> None:
    request = make_request(
        data.draw(st.lists(ids, min_size=1, max_size=20)),
        data.draw(counts),
        data.draw(texts),
        params=params,
        seed=data.draw(st.integers(-(2**63), 2**64 - 1)),
        stop_ids=frozenset(data.draw(id_lists)),
        bad_word_ids=tuple(map(tuple, data.draw(st.lists(id_lists, max_size=3)))),
        priority=data.draw(st.integers(-(2**31), 2**31 - 1)),
        tenant=data.draw(texts),
        cache_salt=data.draw(texts),
    )
    message = sent(request)
    assert message.call == 7
    received = message.request
    assert received.params == params
    assert [type(getattr(received.params, f.name)) for f in fields(params) if f.type != "float"] == [
        type(getattr(params, f.name)) for f in fields(params) if f.type != "float"
    ]
    assert received == request.spec


def test_resumed_request_is_sent_with_its_outputs() -> None:
    request = make_request([1, 2, 3], 9)
    request.token_ids += [7, 8]
    received = Request(sent(request).request)
    assert received.token_ids == [1, 2, 3, 7, 8]
    assert received.num_prompt_tokens == 3


@given(
    id_lists,
    st.lists(st.tuples(counts, deltas), max_size=3),
    st.lists(replies, max_size=3),
    st.none() | stats,
)
def test_step_outputs_survive_the_wire(handles: list[int], others: Any, replies: Any, numbers: Any) -> None:
    outputs = StepOutputs(handles, handles, handles, others, replies, numbers)
    received = round_trip(TO_CLIENT, outputs)
    assert received == outputs
    assert [type(delta) for _, delta in received.deltas] == [Delta] * len(others)


@given(texts, stats, st.lists(ids, max_size=3).map(tuple), st.none() | texts)
def test_model_facts_survive_the_wire(
    name: str, numbers: EngineStats, eos: tuple[int, ...], folder: str | None
) -> None:
    facts = ModelFacts(
        name, 5, 6, eos, {"temperature": 0.7, "top_k": 3}, folder, "cpu", "float32", 1, 2, 3, 4
    )
    assert round_trip(TO_CLIENT, Ready(facts, numbers)) == Ready(facts, numbers)


@pytest.mark.parametrize(
    "message",
    [
        Start("model", {"a": [1, None]}, 0.5),
        Abort(None, 1, "stop"),
        Abort(2, 1, "x"),
        *(kind(7, command()) for command, kind in COMMAND_MESSAGES.items()),
        Ack(3),
        Stop(),
    ],
)
def test_small_messages_survive_the_wire(message: Any) -> None:
    assert round_trip(TO_ENGINE, message) == message


def test_every_command_has_a_message() -> None:
    assert COMMAND_MESSAGES.keys() == set(get_args(Command))
    assert set(COMMAND_MESSAGES.values()) == set(get_args(CommandMessage))


@dataclass(frozen=True, slots=True)
class TakeNumbers:
    """A command with fields."""

    name: str
    numbers: list[float]


class RunTakeNumbers(RunCommand[TakeNumbers], frozen=True):
    pass


def test_fields_of_a_command_survive_the_wire_and_are_checked() -> None:
    codec: Codec[Any] = Codec(SECRET, RunTakeNumbers | CommandMessage)
    message = RunTakeNumbers(7, TakeNumbers("weights", [0.5, 1.0]))
    frame = bytes(codec.encode(message))
    assert codec.decode(frame) == message
    answer = codec.decode_call(frame.replace(b"numbers", b"letters"))
    assert isinstance(answer, Unreadable)
    assert answer.call == 7


# ---- what does not fit ----


def test_integers_beyond_64_bits_become_the_largest() -> None:
    params = SamplingParams(top_k=10**30, max_tokens=10**40, temperature=10**25, seed=2**64 - 1)
    params_received = sent(make_request([1], params=params)).request.params
    assert (params_received.top_k, params_received.max_tokens, params_received.temperature) == (
        LARGEST,
        LARGEST,
        1e25,
    )
    assert params_received.seed == 2**64 - 1


@pytest.mark.parametrize("field", [{"tenant": "\ud800"}, {"seed": 2**64}, {"task": object()}])
def test_request_that_cannot_be_encoded_is_rejected(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        encode_add(TO_ENGINE, 1, make_request([1], **field))


# ---- frames that are no messages ----


def dropped(codec: Codec[Any], frame: bytes) -> bool:
    before = codec.num_dropped
    message = codec.decode(frame)
    return message is None and codec.num_dropped == before + 1


@given(st.binary(max_size=60), st.booleans())
def test_random_bytes_are_dropped(noise: bytes, known: bool) -> None:
    assert dropped(TO_ENGINE, SECRET + noise if known else noise)


@given(
    st.recursive(
        st.none() | st.booleans() | counts | texts, lambda x: st.lists(x) | st.dictionaries(texts, x)
    )
)
def test_values_that_are_not_messages_are_dropped(value: Any) -> None:
    assert dropped(TO_CLIENT, SECRET + msgspec.msgpack.encode(value))


def test_truncated_altered_and_foreign_frames_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    frame = bytes(encode_add(TO_ENGINE, 1, make_request([1, 2, 3])))
    assert TO_ENGINE.decode(frame) is not None
    assert all(dropped(TO_ENGINE, frame[:end]) for end in range(len(frame)))
    assert dropped(TO_ENGINE, b"t" + frame[1:])
    assert dropped(TO_CLIENT, frame)  # it goes the other way
    assert dropped(TO_ENGINE, SECRET + b"\x91" * 100_000)
    assert "wrong connection secret" in caplog.text


def test_parameters_are_checked_on_arrival_too() -> None:
    frame = bytes(encode_add(TO_ENGINE, 1, make_request([1], params=SamplingParams(top_p=0.5))))
    assert dropped(TO_ENGINE, frame.replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(-0.5)))


@pytest.mark.parametrize("ids", [b"", b"1234567", b"123456789"])
def test_ids_are_checked_on_arrival_too(ids: bytes) -> None:
    frame = bytes(encode_add(TO_ENGINE, 1, make_request([5])))
    whole = msgspec.msgpack.encode((5).to_bytes(8, sys.byteorder))
    assert whole in frame
    assert dropped(TO_ENGINE, frame.replace(whole, msgspec.msgpack.encode(ids)))


def test_codec_encodes_one_frame_after_another() -> None:
    """The buffer is used again: a short frame after a long one has nothing of it."""
    long = bytes(TO_CLIENT.encode(StepOutputs(list(range(1000)), list(range(1000)))))
    short = bytes(TO_CLIENT.encode(Heartbeat(1.0, True)))
    assert len(short) < 40 < len(long)
    assert TO_CLIENT.decode(short) == Heartbeat(1.0, True)


# ---- errors ----

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]


def remote(error: BaseException) -> InflightError:
    """The error as it arrives."""
    frame = bytes(
        TO_CLIENT.encode(StepOutputs(replies=[Reply(1, remote_error=RemoteError.from_exception(error))]))
    )
    message: Any = TO_CLIENT.decode(frame)
    received: InflightError = message.replies[0].remote_error.error()
    return received


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("more", [{}, {"param": "top_p", "code": "odd"}])
def test_our_errors_keep_their_class_and_fields(kind: type[InflightError], more: dict[str, str]) -> None:
    error = kind("it is 3: allowed is 4", **more)
    error.add_note("in prompt 2")
    received = remote(error)
    assert type(received) is kind
    assert str(received) == "it is 3: allowed is 4"
    assert received.__notes__ == ["in prompt 2"]
    assert (received.param, received.code) == (error.param, error.code)
    assert (error.param, error.code) == (more.get("param"), more.get("code", kind.code))


def test_foreign_errors_become_engine_errors() -> None:
    received = remote(KeyError("x\ud800"))
    assert type(received) is EngineError
    assert (received.param, received.code) == (None, "engine_error")
    assert str(received).startswith("KeyError: 'x")
    assert type(RemoteError("annotations", "x", []).error()) is EngineError
