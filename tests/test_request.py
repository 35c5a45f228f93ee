from __future__ import annotations

from array import array
from dataclasses import Field, fields, make_dataclass
from typing import Any

import msgspec
import pytest

from inflight.engine.remote.wire import Add, ToEngine, encode_add
from inflight.errors import ParameterError
from inflight.execution.parallel import messages
from inflight.processes.channel import SECRET_LENGTH, Codec, array_from_bytes, array_to_bytes
from inflight.request import ContextOptions, Request, RequestContext, RequestOrigin, RequestSpec, Status
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission, Batch


def test_new_request_counts_its_prompt() -> None:
    request = Request.create("r", [5, 6, 7], SamplingParams(), 10)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_computed) == (3, 3, 0)
    assert (request.max_total, request.num_output_tokens) == (13, 0)
    assert request.status is Status.WAITING
    assert request.record.num_prompt_tokens == 3


def test_resumed_request_knows_its_outputs() -> None:
    request = Request.create("r", [5, 6, 7, 8, 9], SamplingParams(), 10, num_prompt_tokens=3)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert request.max_total == 13


def test_requests_are_distinguished_by_identity() -> None:
    one, other = (Request.create("r", [1], SamplingParams(), 1) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2
    assert one.record is not other.record
    assert one.tables is not other.tables


def unusual(item: Field[Any]) -> Any:
    """A value for a field of the spec that is not its default."""
    if item.name == "context":
        return RequestContext(**{field.name: unusual(field) for field in fields(RequestContext)})
    values = {
        "request_id": "r",
        "token_ids": array("q", [5, 6, 7]),
        "params": SamplingParams(temperature=0.3, max_tokens=9),
        "max_tokens": 9,
        "num_prompt_tokens": 3,
        "prediction_ids": array("q", [8, 9]),
        "kind": "generate",  # the only kind with outputs
        "origin": RequestOrigin("chatcmpl-1", 1, "team", "/v1/chat/completions", "Hello"),
    }
    if item.name in values:
        return values[item.name]
    by_type = {"int": 17, "str": "word", "bool": not item.default, "frozenset[int]": frozenset({4})}
    return by_type.get(str(item.type), ((1, 2), (3,)))


SPEC = RequestSpec(**{item.name: unusual(item) for item in fields(RequestSpec)})
# As if a field had been added to the spec, which nothing else knows of.
WIDER = make_dataclass("WIDER", [("note", str, "")], bases=(RequestSpec,), frozen=True, slots=True)


@pytest.mark.parametrize("name", [item.name for item in fields(RequestSpec)])
def test_no_field_is_lost_on_the_way_to_an_engine_a_rank_or_another_replica(name: str) -> None:
    codec: Codec[Any] = Codec(bytes(SECRET_LENGTH), ToEngine)
    added = codec.decode(bytes(encode_add(codec, 1, Request(SPEC))))
    assert isinstance(added, Add)
    step = messages.RankStep(Batch(0, admissions=[Admission(0, SPEC)]), [])
    received = messages.decode(messages.encode(step))
    assert isinstance(received, messages.RankStep)
    for spec in (added.request, received.batch.admissions[0].request, SPEC.resumed([])):
        assert getattr(spec, name) == getattr(SPEC, name)


def test_context_is_taken_from_keyword_arguments_and_checked() -> None:
    options: dict[str, Any] = {"tenant": "t", "tools": []}
    assert RequestContext.pop(options) == RequestContext(tenant="t")
    assert options == {"tools": []}
    assert ContextOptions.__annotations__.keys() == RequestContext.__dataclass_fields__.keys()
    for wrong in ({"priority": "high"}, {"priority": 2**31}, {"tenant": 3}, {"cache_salt": "\ud800"}):
        with pytest.raises(ParameterError) as caught:
            RequestContext(**wrong)
        assert caught.value.param in wrong


def test_names_of_blocks_cover_the_prompt_and_its_outputs() -> None:
    request = Request.create("r", [5, 6, 7], SamplingParams(), 10)
    request.token_ids += [8, 9]
    for start in range(6):
        for stop in range(start, 6):
            assert request.name_ids(start, stop) == array("q", request.token_ids[start:stop]).tobytes()


def test_added_field_survives_preemption_failover_and_the_wire() -> None:
    spec = WIDER(**{item.name: getattr(SPEC, item.name) for item in fields(SPEC)}, note="kept")
    request = Request(spec)
    request.token_ids.append(8)
    again = request.resumed([8, 9])
    assert again.token_ids == [5, 6, 7, 8, 9]
    for copy in (request.current_spec(), again.spec):
        assert getattr(copy, "note") == "kept"  # noqa: B009
        encoded = msgspec.msgpack.encode(copy, enc_hook=array_to_bytes)
        assert msgspec.msgpack.decode(encoded, type=WIDER, dec_hook=array_from_bytes) == copy
