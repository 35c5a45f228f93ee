"""Who is blamed when engines die."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from inflight.events import Delta
from inflight.request import Request
from inflight.router.routed import FEW, MAX_DEATHS, RoutedRequest, Suspicion, share_blame
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request


@dataclass
class Lost:
    is_accepted: bool = True
    has_token_here: bool = False
    suspicion: Suspicion = field(default_factory=Suspicion)


def test_one_alone_ends_after_the_second_death() -> None:
    poison = Lost()
    share_blame([poison])
    assert (poison.suspicion.is_tried_alone, poison.suspicion.is_confirmed) == (True, False)
    share_blame([poison])
    assert poison.suspicion.is_confirmed


def test_those_with_tokens_are_not_blamed_beside_one_without() -> None:
    poison, others = Lost(), [Lost(has_token_here=True) for _ in range(20)]
    share_blame([poison, *others])
    assert poison.suspicion.share == 1
    assert all(other.suspicion.share == 0 for other in others)


def test_a_few_newcomers_are_tried_alone_and_the_next_death_names_one() -> None:
    newcomers = [Lost() for _ in range(FEW - 1)]
    share_blame(newcomers)
    assert all(one.suspicion.is_tried_alone for one in newcomers)
    share_blame(newcomers[:1])
    assert [one.suspicion.is_confirmed for one in newcomers] == [True, *[False] * (FEW - 2)]


def test_the_one_on_trial_is_blamed_whoever_came_beside_it() -> None:
    tried, other = Lost(), Lost()
    share_blame([tried, other])
    share_blame([tried, *(Lost() for _ in range(5))], on_trial=tried)
    assert tried.suspicion.is_confirmed
    waiting = Lost(is_accepted=False)
    share_blame([waiting, other], on_trial=waiting)
    assert (waiting.suspicion.share, other.suspicion.is_confirmed) == (0, True)


def test_many_who_got_on_well_go_on_all_at_once_and_end_only_alone() -> None:
    for count in (1, 2, 50):
        lost = [Lost(has_token_here=True) for _ in range(count)]
        share_blame(lost)
        assert not any(one.suspicion.is_tried_alone for one in lost)
    crowd = [Lost() for _ in range(50)]
    for _ in range(5):  # the next engines die under all of them before any gets a token
        share_blame(crowd)
    assert not any(one.suspicion.is_confirmed for one in crowd)


def test_a_token_clears_and_a_request_that_was_never_taken_is_innocent() -> None:
    one, sent = Lost(), Lost(is_accepted=False)
    share_blame([one, sent])
    assert (one.suspicion.share, sent.suspicion.share, sent.suspicion.num_deaths) == (1, 0, 0)
    one.suspicion.clear()
    share_blame([one])
    assert not one.suspicion.is_confirmed


def test_there_is_an_end_to_it() -> None:
    one = Lost(has_token_here=True)
    for _ in range(MAX_DEATHS):
        assert not one.suspicion.is_confirmed
        one.suspicion.clear()
        share_blame([one])
    assert one.suspicion.is_confirmed


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
