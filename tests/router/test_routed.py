"""What is left of a request whose engine is gone."""

from __future__ import annotations

import pytest

from inflight.events import Delta
from inflight.request import Request
from inflight.router.routed import RoutedRequest
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request


def routed(outputs: list[int], **fields: object) -> RoutedRequest:
    found = RoutedRequest(make_request([1, 2], 3, "r", **fields), arrived_at=10.0)
    found.take(Delta("r", outputs), now=12.0)
    return found


def test_the_rest_is_a_request_for_what_is_missing() -> None:
    rest = routed([4, 5]).rest()
    assert isinstance(rest, Request)
    assert (rest.token_ids, rest.num_prompt_tokens, rest.max_tokens) == ([1, 2, 4, 5], 2, 3)
    assert isinstance(routed([]).rest(), Request)


@pytest.mark.parametrize(
    ("outputs", "reason", "stop_id"),
    [([4, 5, 6], "length", None), ([4, 9], "stop", 9), ([4, 5, 9], "stop", 9)],
)
def test_an_answer_that_was_whole_ends_as_it_would_have(
    outputs: list[int], reason: str, stop_id: int | None
) -> None:
    """Its engine had given the last token, and died before it told the end."""
    one = routed(outputs, stop_ids=frozenset({9}))
    one.lost()
    rest = one.rest()
    assert isinstance(rest, Delta)
    assert (rest.token_ids, rest.finish_reason, rest.stop_token_id) == ([], reason, stop_id)
    one.complete(rest, now=15.0)
    record = rest.record
    assert record is not None
    assert (record.finish_reason, record.num_output_tokens, record.num_failovers) == (reason, len(outputs), 1)
    assert (record.arrived_at, record.first_token_at, record.last_token_at) == (10.0, 12.0, 12.0)
    assert (record.finished_at, record.breakdown.total) == (15.0, 5.0)


def test_a_stop_before_the_least_number_of_tokens_is_none() -> None:
    params = SamplingParams(max_tokens=3, min_tokens=2, temperature=0)
    assert isinstance(routed([4, 9], stop_ids=frozenset({9}), params=params).rest(), Request)


def test_who_was_aborted_is_not_taken_up_again() -> None:
    one = routed([4])
    one.abort_reason = "stop"
    rest = one.rest()
    assert isinstance(rest, Delta)
    assert rest.finish_reason == "stop"
