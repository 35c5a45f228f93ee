"""Who is blamed when engines die."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.router.suspicion import FEW, MAX_DEATHS, Suspicion, share_blame


@dataclass
class Lost:
    is_taken: bool = True
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
    waiting = Lost(is_taken=False)
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
    one, sent = Lost(), Lost(is_taken=False)
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
