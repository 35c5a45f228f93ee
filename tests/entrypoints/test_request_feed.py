"""Requests that are created as steps need them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from inflight.entrypoints.offline import RequestFeed
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.requests import FakeEngine, make_request


def requests(count: int, longest: int, made: list[str]) -> Iterator[Request]:
    draw = random.Random(0)
    for index in range(count):
        prompt = [draw.randrange(50) for _ in range(draw.randint(1, longest))]
        made.append(str(index))
        yield make_request(prompt, 0, str(index), params=SamplingParams(), task="pool", splittable=False)


def run(engine: FakeEngine, feed: RequestFeed) -> list[list[str]]:
    """Who was in each step."""
    while engine.core.has_work or not feed.is_empty:
        feed.fill()
        for request_id in feed.added:
            engine.outputs.setdefault(request_id, [])
        engine.take(engine.core.step())
    return [[slot.request_id for slot in record.slots] for record in engine.records]


def make_engine(depth: int) -> FakeEngine:
    return FakeEngine(num_blocks=500, max_num_seqs=24, pipeline_depth=depth, caching=False)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("longest", [3, 40])
def test_lazy_steps_are_as_full_as_eager_ones(longest: int, depth: int) -> None:
    """Texts so short that slots run out, and longer ones of which one must fit into what is left."""
    lazy, eager = make_engine(depth), make_engine(depth)
    made: list[str] = []
    lazily = run(lazy, RequestFeed(lazy.core, requests(300, longest, made), lazily=True))
    at_once = run(eager, RequestFeed(eager.core, requests(300, longest, []), lazily=False))
    assert lazily == at_once
    assert lazy.vectors == eager.vectors
    assert sorted(lazy.vectors) == sorted(made)


def test_first_step_waits_only_for_its_own_requests() -> None:
    made: list[str] = []
    engine = make_engine(depth=2)
    feed = RequestFeed(engine.core, requests(1000, 20, made), lazily=True)
    feed.fill()
    assert len(made) == len(feed.added) < 50
    assert not feed.is_empty


def test_eager_feed_adds_all_requests_at_once() -> None:
    made: list[str] = []
    engine = make_engine(depth=2)
    feed = RequestFeed(engine.core, requests(100, 20, made), lazily=False)
    feed.fill()
    assert feed.is_empty
    assert feed.added == made == [str(index) for index in range(100)]


def test_empty_feed_adds_nothing() -> None:
    engine = make_engine(depth=1)
    feed = RequestFeed(engine.core, iter(()), lazily=True)
    assert run(engine, feed) == []
    assert feed.is_empty
