"""The timeline in a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from inflight.timeline.chunk_json import chunk_json
from inflight.timeline.recorder import Recorder
from inflight.timeline.terminal import TimelineWindow
from tests.scheduling.guessing import guessing
from tests.support.requests import FakeEngine, make_request
from tests.timeline.cells import chunks_of


def chunks(num_requests: int, own: set[int] | None = None, **options: Any) -> list[dict[str, Any]]:
    engine = FakeEngine(num_blocks=200, **options)
    engine.core.clock = _Ticks(0.01).__next__
    recorder = Recorder(engine.scheduler.limits, engine.num_blocks, engine.block_size)
    engine.core.recorder = recorder
    for index in range(num_requests):
        engine.add(make_request([index, 1, 2], 10 + 5 * index))
    engine.run()
    known: set[int] = set()
    return [chunk_json(chunk, "0", 0.0, known, own) for chunk in chunks_of(recorder)]


class _Ticks:
    """A clock that advances with every look at it."""

    def __init__(self, step: float) -> None:
        self._now, self._step = 100.0, step

    def __next__(self) -> float:
        self._now += self._step
        return self._now


def drawn(window: TimelineWindow, now: float, width: int = 80, height: int = 20) -> list[str]:
    file = io.StringIO()
    Console(width=width, height=height, file=file, color_system=None).print(window.draw(now, width, height))
    return file.getvalue().splitlines()


def test_slots_are_drawn_with_their_prefills_and_decodes() -> None:
    window = TimelineWindow(10.0)
    for chunk in chunks(3):
        window.add(chunk)
    last = window.replicas["0"].steps[-1].end
    lines = drawn(window, last)
    assert lines[0].startswith("replica 0  running")
    slots = [line for line in lines if line.startswith("slot")]
    assert [line[:6] for line in slots] == ["slot 0", "slot 1", "slot 2"]
    assert all("▒" in line and "█" in line for line in slots)
    lengths = [line.count("█") for line in slots]
    assert lengths == sorted(lengths), "requests with more tokens take longer"


def test_share_of_accepted_drafts_is_shown() -> None:
    window = TimelineWindow(10.0)
    for chunk in chunks(3, speculation=guessing(0.6)):
        window.add(chunk)
    runs = window.replicas["0"].runs
    accepted, refused = (sum(run.num_drafted()[index] for run in runs) for index in (0, 1))
    (summary, *_) = drawn(window, window.replicas["0"].steps[-1].end, width=120)
    assert summary.endswith(f"drafts {accepted / (accepted + refused):.0%} accepted")


def test_slots_of_others_are_drawn_without_their_requests() -> None:
    window = TimelineWindow(10.0)
    for chunk in chunks(3, own={1}):
        window.add(chunk)
    slots = [line for line in drawn(window, window.replicas["0"].steps[-1].end) if line.startswith("slot")]
    assert [line[:6] for line in slots] == ["slot 0", "slot 1", "slot 2"]
    assert ["█" in line for line in slots] == [False, True, False]
    lengths = [line.count("░") for line in slots]
    assert lengths[0] > lengths[2] > lengths[1] == 0, (
        "the longer one of the two goes on in the lowest free slot"
    )


def test_picture_fits_the_terminal() -> None:
    window = TimelineWindow(10.0)
    for chunk in chunks(8, max_num_seqs=8):
        window.add(chunk)
    last = window.replicas["0"].steps[-1].end
    lines = drawn(window, last, width=60, height=8)
    assert len(lines) <= 8
    assert all(len(line) <= 60 for line in lines)
    assert "more slots are in use" in lines[-1]


def test_old_steps_are_forgotten() -> None:
    window = TimelineWindow(1.0)
    for chunk in chunks(3):
        window.add(chunk)
    replica = window.replicas["0"]
    last = replica.steps[-1].end
    drawn(window, last)
    assert all(step.end >= last - 1.0 for step in replica.steps)
    drawn(window, last + 100)
    assert not replica.steps
    assert not replica.runs


def test_empty_timeline_says_so() -> None:
    assert drawn(TimelineWindow(), 0.0) == ["no steps yet"]
