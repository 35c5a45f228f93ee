"""A batch is plain data: it can be serialized, and a recorded run can be replayed."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from inflight.kv.layout import KVLayout
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Batch
from tests.scheduling.hostile import SmallBites
from tests.support.fake_runner import FakeRunner
from tests.support.requests import FakeEngine, make_request


def to_plain(value: Any) -> Any:
    assert isinstance(value, array), f"{value!r} is not plain data"
    return value.tobytes()


def from_plain(kind: type, value: Any) -> Any:
    assert kind is array or getattr(kind, "__origin__", None) is array
    return array("q", value)


def sent(batch: Batch) -> Batch:
    """Return the batch as another process receives it."""
    return msgspec.msgpack.decode(
        msgspec.msgpack.encode(batch, enc_hook=to_plain), type=Batch, dec_hook=from_plain
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_batches_yield_the_same_tokens(depth: int) -> None:
    engine = FakeEngine(SmallBites, num_blocks=9, max_num_batched_tokens=7, pipeline_depth=depth)
    recorded: list[tuple[bytes, Any]] = []
    launch = engine.runner.launch

    def recording(batch: Batch) -> Any:
        frame = msgspec.msgpack.encode(batch, enc_hook=to_plain)
        sampled = launch(batch)
        recorded.append((frame, sampled))
        return sampled

    engine.runner.launch = recording  # type: ignore[method-assign]
    for index in range(6):
        engine.add(make_request([index] * (1 + index * 3), 5, stop_ids=frozenset({3, 4})))
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    fresh = FakeRunner(9, KVLayout(4))
    for frame, sampled in recorded:
        batch = msgspec.msgpack.decode(frame, type=Batch, dec_hook=from_plain)
        assert fresh.collect(fresh.launch(batch)) == sampled


def test_every_field_of_a_request_survives_serialization() -> None:
    params = SamplingParams(
        temperature=0.5,
        seed=2**64 - 1,
        stop=["end"],
        stop_token_ids=[3],
        logit_bias={4: 1.5},
        bad_words=["no"],
        logprobs=2,
        prompt_logprobs=1,
        min_tokens=1,
    )
    engine = FakeEngine()
    request = make_request(
        [5, 6, 7], 9, params=params, seed=2**64 - 1, stop_ids=frozenset({3}), bad_word_ids=((8, 9), (1,))
    )
    engine.add(request)
    step = engine.scheduler.schedule(0.0)
    assert step is not None
    there = sent(step.batch)
    assert there == step.batch
    known = there.admissions[0].request
    assert known.token_ids == array("q", [5, 6, 7])
    assert (known.params, known.seed, known.bad_word_ids) == (params, 2**64 - 1, ((8, 9), (1,)))
