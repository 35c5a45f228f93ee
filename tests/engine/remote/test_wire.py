"""Messages survive the wire unchanged, and what is no message is dropped."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import errors
from inflight.engine.client import ModelFacts, RequestState
from inflight.engine.remote.wire import (
    LARGEST,
    Abort,
    Ack,
    FromEngine,
    Heartbeat,
    Ready,
    Reply,
    Start,
    StepOutputs,
    ToEngine,
    encode_add,
)
from inflight.engine.stats import EngineStats
from inflight.errors import EngineError, InflightError, RequestError
from inflight.events import (
    AbortRecord,
    ArrivalRecord,
    Delta,
    KVUsage,
    Preemption,
    RequestRecord,
    SlotRecord,
    StepRecord,
    TimeBreakdown,
    TokenLogprob,
    pack_logprobs,
)
from inflight.processes.channel import SECRET_LENGTH, Codec, RemoteError, Stop
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request

SECRET = b"s" * SECRET_LENGTH
TO_ENGINE: Codec[Any] = Codec(SECRET, ToEngine)
TO_FRONT: Codec[Any] = Codec(SECRET, FromEngine)

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
slots = st.builds(SlotRecord, ids, texts, ids, ids, st.booleans(), st.booleans())
names = st.lists(texts, max_size=3).map(tuple)
arrivals = st.lists(st.builds(ArrivalRecord, texts, times), max_size=3).map(tuple)
aborts = st.lists(st.builds(AbortRecord, texts, times, texts), max_size=3).map(tuple)
preemptions = st.lists(st.builds(Preemption, texts, texts), max_size=3).map(tuple)
steps = st.builds(
    StepRecord, counts, times, times, st.lists(slots, max_size=3).map(tuple), names, preemptions, names,
    st.lists(ids, max_size=3).map(tuple), counts, counts, usages, st.none() | texts,
    times, times, times, texts, arrivals, aborts,
)  # fmt: skip
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
def test_requests(params: SamplingParams, data: st.DataObject) -> None:
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


def test_a_request_that_has_grown_travels_whole() -> None:
    request = make_request([1, 2, 3], 9)
    request.token_ids += [7, 8]
    received = Request(sent(request).request)
    assert received.token_ids == [1, 2, 3, 7, 8]
    assert received.num_prompt_tokens == 3


@given(
    id_lists,
    st.lists(st.tuples(counts, deltas), max_size=3),
    st.lists(replies, max_size=3),
    st.lists(steps, max_size=3),
    st.none() | stats,
)
def test_news(handles: list[int], others: Any, replies: Any, records: Any, numbers: Any) -> None:
    outputs = StepOutputs(handles, handles, others, replies, records, numbers)
    found = round_trip(TO_FRONT, outputs)
    assert found == outputs
    assert [type(delta) for _, delta in found.deltas] == [Delta] * len(others)
    assert all(type(slot) is SlotRecord for record in found.steps for slot in record.slots)


@given(texts, stats, st.lists(ids, max_size=3).map(tuple), st.none() | texts)
def test_facts(name: str, numbers: EngineStats, eos: tuple[int, ...], folder: str | None) -> None:
    facts = ModelFacts(
        name, 5, 6, eos, {"temperature": 0.7, "top_k": 3}, folder, "cpu", "float32", 1, 2, 3, 4
    )
    assert round_trip(TO_FRONT, Ready(facts, numbers)) == Ready(facts, numbers)


@pytest.mark.parametrize(
    "message",
    [Start("model", {"a": [1, None]}, 0.5), Abort(None, 1, "stop"), Abort(2, 1, "x"), Ack(3), Stop()],
)
def test_small_messages(message: Any) -> None:
    assert round_trip(TO_ENGINE, message) == message


# ---- what does not fit ----


def test_numbers_without_limit_become_the_largest() -> None:
    params = SamplingParams(top_k=10**30, max_tokens=10**40, temperature=10**25, seed=2**64 - 1)
    found = sent(make_request([1], params=params)).request.params
    assert (found.top_k, found.max_tokens, found.temperature) == (LARGEST, LARGEST, 1e25)
    assert found.seed == 2**64 - 1


@pytest.mark.parametrize("field", [{"tenant": "\ud800"}, {"seed": 2**64}, {"cache_salt": object()}])
def test_what_cannot_travel_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        encode_add(TO_ENGINE, 1, make_request([1], **field))


# ---- frames that are no messages ----


def dropped(codec: Codec[Any], frame: bytes) -> bool:
    before = codec.num_dropped
    found = codec.decode(frame)
    return found is None and codec.num_dropped == before + 1


@given(st.binary(max_size=60), st.booleans())
def test_noise_is_dropped(noise: bytes, known: bool) -> None:
    assert dropped(TO_ENGINE, SECRET + noise if known else noise)


@given(
    st.recursive(
        st.none() | st.booleans() | counts | texts, lambda x: st.lists(x) | st.dictionaries(texts, x)
    )
)
def test_values_that_are_no_messages_are_dropped(value: Any) -> None:
    assert dropped(TO_FRONT, SECRET + msgspec.msgpack.encode(value))


def test_cut_changed_and_foreign_frames_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    frame = bytes(encode_add(TO_ENGINE, 1, make_request([1, 2, 3])))
    assert TO_ENGINE.decode(frame) is not None
    assert all(dropped(TO_ENGINE, frame[:end]) for end in range(len(frame)))
    assert dropped(TO_ENGINE, b"t" + frame[1:])
    assert dropped(TO_FRONT, frame)  # it goes the other way
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


def test_frames_of_one_codec_follow_each_other() -> None:
    """The buffer is used again: a short frame after a long one has nothing of it."""
    long = bytes(TO_FRONT.encode(StepOutputs(list(range(1000)), list(range(1000)))))
    short = bytes(TO_FRONT.encode(Heartbeat(1.0, True, 0)))
    assert len(short) < 40 < len(long)
    assert TO_FRONT.decode(short) == Heartbeat(1.0, True, 0)


# ---- errors ----

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]


def remote(error: BaseException) -> InflightError:
    """The error as it arrives."""
    frame = bytes(TO_FRONT.encode(StepOutputs(replies=[Reply(1, remote_error=RemoteError.of(error))])))
    message: Any = TO_FRONT.decode(frame)
    found: InflightError = message.replies[0].remote_error.error()
    return found


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("more", [{}, {"param": "top_p", "code": "odd"}])
def test_errors_stay_what_they_are(kind: type[InflightError], more: dict[str, str]) -> None:
    error = kind("it is 3: allowed is 4", **more)
    error.add_note("in prompt 2")
    found = remote(error)
    assert type(found) is kind
    assert str(found) == "it is 3: allowed is 4"
    assert found.__notes__ == ["in prompt 2"]
    assert (found.param, found.code) == (error.param, error.code)
    assert (error.param, error.code) == (more.get("param"), more.get("code", kind.code))


def test_errors_of_others_become_ours() -> None:
    found = remote(KeyError("x\ud800"))
    assert type(found) is EngineError
    assert (found.param, found.code) == (None, "engine_error")
    assert str(found).startswith("KeyError: 'x")
    assert type(RemoteError("annotations", "x", []).error()) is EngineError
