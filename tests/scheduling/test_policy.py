"""The waiting queue, compared with a sorted list."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from inflight.request import Request
from inflight.scheduling.policy import WaitingQueue
from tests.support.requests import make_request

ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(-2, 2)), max_size=30)


@given(ACTIONS)
def test_queue_yields_each_request_once_in_order(actions: list[tuple[bool, int, int]]) -> None:
    queue = WaitingQueue()
    requests = [make_request([1]) for _ in range(6)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    waiting: set[Request] = set()
    for pushes, index, order in actions:
        request = requests[index]
        if pushes:
            request.order = order
            queue.push(request)
            waiting.add(request)
        else:
            queue.remove(request)
            waiting.discard(request)
        expected = sorted(waiting, key=lambda one: (one.order, one.arrival))
        assert queue.head(10) == expected
        assert queue.first() == (expected[0] if expected else None)
        assert len(queue) == len(expected)
