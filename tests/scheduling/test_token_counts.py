"""Token counts through the life of a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inflight.request import Request
from inflight.scheduling.request_pool import TokenCounts
from tests.scheduling.guessing import guessing
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request


def counts_of(request: Request) -> tuple[int, int, int]:
    return request.num_computed, request.num_tokens, request.num_in_flight


def holding_blocks(prompt: list[int], kv_capacity: int = 16) -> Request:
    request = make_request(prompt, 8)
    request.tables, request.kv_capacity = [[0]], kv_capacity
    return request


def test_counts_through_chunks_and_decodes() -> None:
    counts, request = TokenCounts(), holding_blocks([1, 2, 3, 4, 5])
    assert counts.schedule(request, 3) == (False, False)
    assert counts_of(request) == (3, 5, 0)
    assert counts.schedule(request, 2) == (True, True)
    assert counts_of(request) == (5, 6, 1)
    counts.accept(request, 1)
    counts.decode(request)
    assert counts_of(request) == (6, 7, 1)
    assert counts.num_resident == 6


def test_withdrawn_request_has_nothing_in_flight() -> None:
    counts, request = TokenCounts(), holding_blocks([1, 2])
    counts.withdraw(request, *counts.schedule(request, 2))
    counts.release(request)
    assert counts_of(request) == (0, 2, 0)
    assert counts.num_resident == 0


def test_failed_step_returns_to_the_known_tokens() -> None:
    counts, request = TokenCounts(), holding_blocks([1, 2])
    counts.schedule(request, 2)
    counts.fail(request)
    assert (request.num_tokens, request.num_in_flight) == (2, 0)


@pytest.mark.parametrize(("num_accepted", "num_computed"), [(1, 3), (2, 4), (4, 6)])
def test_accepted_drafts_count_as_computed(num_accepted: int, num_computed: int) -> None:
    counts, request = TokenCounts(), holding_blocks([1, 2])
    counts.schedule(request, 2)
    counts.accept(request, 1)
    counts.decode(request)
    counts.draft(request, 3)
    assert counts.num_resident == 6, "drafts take memory while they are verified"
    counts.accept(request, num_accepted)
    assert counts_of(request) == (num_computed, num_computed + 1, 0), "the last token is never computed yet"
    assert counts.num_resident == num_computed


def test_preempted_request_keeps_accepted_tokens_but_no_kv() -> None:
    counts, request = TokenCounts(), holding_blocks([1, 2])
    counts.schedule(request, 2)
    counts.accept(request, 1)
    counts.decode(request)
    counts.draft(request, 2)
    counts.release(request)
    request.tables = []
    counts.accept(request, 3)
    assert counts_of(request) == (0, 6, 0)
    assert counts.num_resident == 0


@pytest.mark.parametrize("end", [TokenCounts.complete, TokenCounts.fail])
def test_dropped_drafts_hold_no_memory(end: Callable[[TokenCounts, Request], None]) -> None:
    counts, request = TokenCounts(), holding_blocks([1, 2])
    counts.schedule(request, 2)
    counts.accept(request, 1)
    counts.decode(request)
    counts.draft(request, 2)
    end(counts, request)
    assert counts.num_resident == request.num_computed == 3


@pytest.mark.parametrize("odds", [0.0, 0.5, 1.0])
def test_no_token_is_computed_twice_unless_it_was_refused(odds: float) -> None:
    """Preemption is the state machine's to try (test_machine.py)."""
    engine = FakeEngine(speculation=guessing(odds), num_blocks=64, caching=False)
    prompts = {name: [number] * 5 for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add(make_request(prompt, 10, name))
    engine.run()
    assert engine.outputs == {name: expected_tokens(prompt, 10) for name, prompt in prompts.items()}
    stats = engine.core.stats()
    num_refused = stats.num_draft_tokens - stats.num_accepted_tokens
    assert engine.runner.num_computed == 3 * (5 + 9) + num_refused
    assert num_refused == 0 or odds < 1
