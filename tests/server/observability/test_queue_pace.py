"""The `Retry-After` estimate of a full queue."""

from __future__ import annotations

from typing import Any

from inflight.frontend.generation import Generation
from inflight.frontend.output_processor import OutputProcessor
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.server.access.keys import Caller
from inflight.server.observability.request_log import MAX_SECONDS, LoggedRequest, QueuePace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def logged(num_tokens: int, max_tokens: int, first_token_at: float | None) -> LoggedRequest:
    entry = LoggedRequest("r", Caller(), "", False, 0, "", print, first_token_at=first_token_at)
    request = Request.create("r", [5], SamplingParams(), max_tokens)
    prompt = OutputProcessor("r", None, [request], None)
    prompt.answers[0].output.token_ids += [7] * num_tokens
    client: Any = None
    entry.generation = Generation(client, [prompt])
    return entry


def test_estimate_without_history_is_the_time_waited() -> None:
    clock = Clock()
    pace = QueuePace(clock)
    assert pace.seconds_to_free_slot([]) == 1
    assert pace.seconds_to_free_slot([logged(0, 100, None)]) == 1
    clock.now += 7  # and no one has had a token: it takes longer than that
    assert pace.seconds_to_free_slot([logged(0, 100, None)]) == 7


def test_estimate_follows_the_intervals_between_ends() -> None:
    clock = Clock()
    pace = QueuePace(clock)
    for _ in range(50):
        clock.now += 12
        pace.record_ends(1)
    assert pace.seconds_to_free_slot([]) == 12
    clock.now += 30  # the next one takes longer than those did
    assert pace.seconds_to_free_slot([]) == 30
    clock.now += 10 * MAX_SECONDS
    assert pace.seconds_to_free_slot([]) == MAX_SECONDS
    pace.resume()
    for _ in range(50):
        clock.now += 12
        pace.record_ends(4)
    assert pace.seconds_to_free_slot([]) == 3


def test_idle_time_does_not_count_as_an_interval() -> None:
    clock = Clock()
    pace = QueuePace(clock)
    for _ in range(50):
        clock.now += 500
        pace.resume()
        clock.now += 2
        pace.record_ends(1)
    assert pace.seconds_to_free_slot([]) == 2


def test_estimate_uses_the_remaining_tokens_of_running_answers() -> None:
    clock = Clock()
    pace = QueuePace(clock)
    slow, fast = logged(11, 68, 90.0), logged(101, 150, 90.0)  # 1 s and 0.1 s for each token
    assert pace.seconds_to_free_slot([slow]) == 57
    assert pace.seconds_to_free_slot([slow, fast]) == 5
    fast.generation = None  # over
    assert pace.seconds_to_free_slot([slow, fast]) == 57
    clock.now += 3
    pace.record_ends(1)  # ends come sooner than the longest answers allow
    assert pace.seconds_to_free_slot([slow]) == 3
