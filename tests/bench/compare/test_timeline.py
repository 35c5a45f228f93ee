from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from inflight.bench.compare.report import Comparison
from inflight.bench.compare.timeline import Timeline, lay_out, request_label, shown_seconds, ticks
from inflight.timeline.chunks import SlotKind
from tests.bench.compare import hand_made
from tests.bench.compare.conftest import NUM_SLOTS

STRATEGIES = ("sequential", "static", "continuous")


def test_labels_continue_after_z() -> None:
    assert [request_label(index) for index in (0, 25, 26, 27, 51, 52, 701, 702)] == [
        "A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA",
    ]  # fmt: skip


def test_hand_made_run_is_laid_out_as_expected() -> None:
    spans = [
        (span.slot, span.request, span.kind, span.first, span.last, span.num_tokens)
        for span in lay_out(hand_made.run()).spans
    ]
    assert spans == [
        (0, 0, SlotKind.PREFILL, 0, 1, 1),
        (0, 0, SlotKind.DECODE, 1, 3, 2),
        (0, 2, SlotKind.PREFILL, 3, 4, 1),
        (0, 2, SlotKind.DECODE, 4, 5, 1),
        (1, 1, SlotKind.PREFILL, 0, 1, 1),
        (1, 1, SlotKind.DECODE, 1, 2, 1),
        (1, 1, SlotKind.HELD, 2, 4, 0),
        (1, 3, SlotKind.PREFILL, 4, 6, 1),  # a prompt in two chunks: only the last one samples
    ]


def test_dropped_token_is_not_counted() -> None:
    run = hand_made.run()
    run.recording.steps[2] = hand_made.step(2, [hand_made.token(0, "a", 1), hand_made.held(1, "b", 1)])
    b = [span for span in lay_out(run).spans if span.request == 1]
    assert [(span.kind, span.first, span.last, span.num_tokens) for span in b] == [
        (SlotKind.PREFILL, 0, 1, 1),
        (SlotKind.DECODE, 1, 2, 1),
        (SlotKind.HELD, 2, 4, 0),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slot_never_holds_two_requests_at_once(comparison: Comparison, strategy: str) -> None:
    timeline = comparison.results[strategy].timeline
    cells = Counter((span.slot, step) for span in timeline.spans for step in range(span.first, span.last))
    assert max(cells.values()) == 1
    assert {slot for slot, _ in cells} <= set(range(NUM_SLOTS))
    assert {step for _, step in cells} == set(range(timeline.num_steps))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_token_is_drawn_once(comparison: Comparison, strategy: str) -> None:
    drawn: Counter[int] = Counter()
    for span in comparison.results[strategy].timeline.spans:
        drawn[span.request] += span.num_tokens
        # A decoding slot produces a token in every step; a held one produces none.
        if span.kind is SlotKind.DECODE:
            assert span.num_tokens == span.last - span.first
        if span.kind is SlotKind.HELD:
            assert span.num_tokens == 0
    assert [drawn[index] for index in range(len(comparison.requests))] == [
        request.num_output_tokens for request in comparison.requests
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adjacent_spans_are_merged_if_equal(comparison: Comparison, strategy: str) -> None:
    spans = comparison.results[strategy].timeline.spans
    for one, other in pairwise(spans):
        if one.slot == other.slot and one.last == other.first:
            assert (one.request, one.kind) != (other.request, other.kind)


def test_timelines_show_how_the_strategies_schedule(comparison: Comparison) -> None:
    sequential, static, continuous = (comparison.results[name].timeline for name in STRATEGIES)
    assert sequential.num_slots_used == 1
    assert static.num_slots_used == continuous.num_slots_used == NUM_SLOTS
    # Static: no request joins before the longest of the batch is done, and finished ones hold their slots until then.
    starts = sorted({span.first for span in static.spans if span.kind is SlotKind.PREFILL})
    assert len(starts) == 3
    assert not any(span.first < start < span.last for span in static.spans for start in starts)
    assert any(span.kind is SlotKind.HELD for span in static.spans)
    for start, end in pairwise(starts):
        slots = {span.slot for span in static.spans if span.last == end}
        assert slots == {span.slot for span in static.spans if start <= span.first < end}
    # Continuous: a released slot is taken in the very next step as long as any request is waiting.
    assert not any(span.kind is SlotKind.HELD for span in continuous.spans)
    last_joins = max(span.first for span in continuous.spans if span.kind is SlotKind.PREFILL)
    busy = Counter(
        step for span in continuous.spans for step in range(span.first, min(span.last, last_joins))
    )
    assert set(busy.values()) == {NUM_SLOTS}


def test_num_done_counts_requests_with_all_their_tokens() -> None:
    timeline = lay_out(hand_made.run())
    assert [timeline.num_done(moment) for moment in (0.0, 1.5, 2.0, 3.0, 5.0, 6.0)] == [0, 0, 1, 2, 3, 4]


def test_pictures_cut_only_a_far_slower_strategy() -> None:
    def lasting(seconds: float) -> Timeline:
        return Timeline("any", 1, [0.0], [seconds], [])

    assert shown_seconds([lasting(9), lasting(3), lasting(2)]) == 3
    assert shown_seconds([lasting(4), lasting(3), lasting(2)]) == 4
    assert shown_seconds([lasting(4)]) == 4


@pytest.mark.parametrize("limit", [10, 96, 0.034, 7, 1])
def test_ticks_are_few_round_and_within_the_limit(limit: float) -> None:
    numbers = ticks(limit)
    assert numbers[0] == 0
    assert numbers[-1] <= limit * (1 + 1e-9)
    assert 4 <= len(numbers) <= 13
    assert ticks(96) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
