"""How the blame for dead engines is shared among their requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from inflight.events import Delta
from inflight.request import Request
from inflight.router.routed import FEW_SUSPECTS, MAX_DEATHS, RoutedRequest, Suspicion, share_blame
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request


@dataclass
class Lost:
    is_accepted: bool = True
    has_token_here: bool = False
    suspicion: Suspicion = field(default_factory=Suspicion)


def test_lone_suspect_is_confirmed_after_the_second_death() -> None:
    poison = Lost()
    share_blame([poison])
    assert (poison.suspicion.is_tried_alone, poison.suspicion.is_confirmed) == (True, False)
    share_blame([poison])
    assert poison.suspicion.is_confirmed


def test_requests_with_tokens_are_not_blamed_beside_one_without() -> None:
    poison, others = Lost(), [Lost(has_token_here=True) for _ in range(20)]
    share_blame([poison, *others])
    assert poison.suspicion.share == 1
    assert all(other.suspicion.share == 0 for other in others)


def test_few_new_requests_are_tried_alone_and_the_next_death_identifies_the_cause() -> None:
    newcomers = [Lost() for _ in range(FEW_SUSPECTS - 1)]
    share_blame(newcomers)
    assert all(one.suspicion.is_tried_alone for one in newcomers)
    share_blame(newcomers[:1])
    assert [one.suspicion.is_confirmed for one in newcomers] == [True, *[False] * (FEW_SUSPECTS - 2)]


def test_request_on_trial_is_blamed_whatever_else_ran() -> None:
    tried, other = Lost(), Lost()
    share_blame([tried, other])
    share_blame([tried, *(Lost() for _ in range(5))], on_trial=tried)
    assert tried.suspicion.is_confirmed
    waiting = Lost(is_accepted=False)
    share_blame([waiting, other], on_trial=waiting)
    assert (waiting.suspicion.share, other.suspicion.is_confirmed) == (0, True)


def test_requests_with_tokens_continue_together_and_are_confirmed_only_alone() -> None:
    for count in (1, 2, 50):
        lost = [Lost(has_token_here=True) for _ in range(count)]
        share_blame(lost)
        assert not any(one.suspicion.is_tried_alone for one in lost)
    crowd = [Lost() for _ in range(50)]
    for _ in range(5):  # the next engines die under all of them before any gets a token
        share_blame(crowd)
    assert not any(one.suspicion.is_confirmed for one in crowd)


def test_token_clears_suspicion_and_unaccepted_requests_get_none() -> None:
    one, sent = Lost(), Lost(is_accepted=False)
    share_blame([one, sent])
    assert (one.suspicion.share, sent.suspicion.share, sent.suspicion.num_deaths) == (1, 0, 0)
    one.suspicion.clear()
    share_blame([one])
    assert not one.suspicion.is_confirmed


def test_request_ends_after_the_maximum_number_of_deaths() -> None:
    one = Lost(has_token_here=True)
    for _ in range(MAX_DEATHS):
        assert not one.suspicion.is_confirmed
        one.suspicion.clear()
        share_blame([one])
    assert one.suspicion.is_confirmed


def routed(outputs: list[int], **fields: object) -> RoutedRequest:
    routed = RoutedRequest(make_request([1, 2], 3, "r", **fields), arrived_at=10.0)
    routed.take(Delta("r", outputs), now=12.0)
    return routed


def test_rest_is_a_request_for_the_missing_tokens() -> None:
    rest = routed([4, 5]).rest()
    assert isinstance(rest, Request)
    assert (rest.token_ids, rest.num_prompt_tokens, rest.max_tokens) == ([1, 2, 4, 5], 2, 3)
    assert isinstance(routed([]).rest(), Request)


@pytest.mark.parametrize(
    ("outputs", "reason", "stop_id"),
    [([4, 5, 6], "length", None), ([4, 9], "stop", 9), ([4, 5, 9], "stop", 9)],
)
def test_complete_answer_ends_with_its_own_finish_reason(
    outputs: list[int], reason: str, stop_id: int | None
) -> None:
    """Its engine died after the last token and before the finish reason."""
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


def test_stop_token_before_min_tokens_does_not_end_the_request() -> None:
    params = SamplingParams(max_tokens=3, min_tokens=2, temperature=0)
    assert isinstance(routed([4, 9], stop_ids=frozenset({9}), params=params).rest(), Request)


def test_aborted_request_is_not_resumed() -> None:
    one = routed([4])
    one.abort_reason = "stop"
    rest = one.rest()
    assert isinstance(rest, Delta)
    assert rest.finish_reason == "stop"
