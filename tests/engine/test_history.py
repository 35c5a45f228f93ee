"""The records of requests that have ended."""

from __future__ import annotations

from inflight.engine.client import MAX_NAMED, History, RequestState
from inflight.events import RequestRecord


def record(name: str, arrived: float, admitted: float | None, finished: float | None) -> RequestRecord:
    return RequestRecord(name, "", 0, 1, arrived, admitted, finished_at=finished)


def test_only_the_latest_records_are_kept() -> None:
    history = History(max_records=3)
    for index in range(5):
        history.add(record(f"r{index}", 0, 0, 1))
    assert len(history) == 3
    assert history.get("r1") is None
    assert history.get("r4") is not None


def test_reused_id_returns_the_later_record() -> None:
    history = History()
    history.add(record("r", 0, 0, 1))
    history.add(record("r", 5, 5, 6))
    state = history.get("r")
    assert state is not None
    assert state.record.arrived_at == 5
    assert len(history) == 1


def test_request_waited_for_those_that_ended_between_its_arrival_and_admission() -> None:
    history = History()
    history.add(record("before", 0, 0, 1))
    history.add(record("during", 0, 0, 3))
    history.add(record("never admitted", 2.5, None, 3))
    history.add(record("after", 0, 0, 5))
    history.add(record("mine", 2, 4, 6))
    state = history.get("mine")
    assert state is not None
    assert (state.waited_for, state.num_waited_for) == (("during",), 1)


def test_waiting_request_also_lists_running_ones() -> None:
    history = History()
    history.add(record("ended", 0, 0, 3))
    state = RequestState(record("mine", 2, None, None), "waiting", waited_for=("runs",), num_waited_for=1)
    assert history.complete(state).waited_for == ("ended", "runs")
    assert history.complete(state).num_waited_for == 2


def test_number_of_listed_requests_is_bounded() -> None:
    history = History()
    for index in range(100):
        history.add(record(f"r{index}", 0, 0, 3))
    state = history.complete(RequestState(record("mine", 2, 4, None), "running"))
    assert len(state.waited_for) == MAX_NAMED
    assert state.num_waited_for == 100
