"""A hand-made run of four requests in two slots:

step      0  1  2  3  4  5
slot 0    P  a  a  P  c           a has 3 tokens, c has 2
slot 1    P  b  .  .  P  P        b has 2 tokens and holds its slot until step 3 is over; d's prompt takes two steps
"""

from __future__ import annotations

from inflight.bench.compare.measure import Recording, RequestRun, StrategyRun
from inflight.timeline.chunks import RecordedRequest, RecordedTimes, SlotKind
from inflight.timeline.steps import RecordedSlot, RecordedStep

PROMPT = 10


def step(number: int, slots: list[RecordedSlot], kv_waste: float = 0.5) -> RecordedStep:
    begin = float(number)
    times = RecordedTimes(begin, begin, begin, begin + 1, begin + 1)
    num_tokens, num_outputs = sum(slot.num_tokens for slot in slots), sum(slot.num_outputs for slot in slots)
    return RecordedStep("0", number, times, num_tokens, num_outputs, 0, 0, 1, kv_waste, slots, [])


def _request(request_id: str) -> RecordedRequest:
    return RecordedRequest("abcd".index(request_id), request_id, PROMPT, 0, 0.0)


def prompt(slot: int, request_id: str, start: int = 0, count: int = PROMPT) -> RecordedSlot:
    samples = start + count == PROMPT
    return RecordedSlot(slot, _request(request_id), SlotKind.PREFILL, start, count, int(samples))


def token(slot: int, request_id: str, number: int) -> RecordedSlot:
    """Return the slot of a step that computes output `number` and produces the next one."""
    return RecordedSlot(slot, _request(request_id), SlotKind.DECODE, PROMPT + number, 1, 1)


def held(slot: int, request_id: str, num_tokens: int = 0) -> RecordedSlot:
    """Return a slot that is kept; with a token, its step was in flight when the request ended."""
    return RecordedSlot(slot, _request(request_id), SlotKind.HELD, PROMPT, num_tokens, 0)


def run() -> StrategyRun:
    steps = [
        step(0, [prompt(0, "a"), prompt(1, "b")], kv_waste=0.0),
        step(1, [token(0, "a", 0), token(1, "b", 0)]),
        step(2, [token(0, "a", 1), held(1, "b")]),
        # The batch ends here: the row is released in this step's update, but was held during the step.
        step(3, [prompt(0, "c"), held(1, "b")]),
        step(4, [token(0, "c", 0), prompt(1, "d", 0, 4)], kv_waste=1.0),
        step(5, [prompt(1, "d", 4, 6)], kv_waste=1.0),
    ]
    requests = [
        RequestRun("a", PROMPT, [1, 2, 3], arrived_at=0.0, first_token_at=1.0, last_token_at=3.0),
        RequestRun("b", PROMPT, [1, 2], arrived_at=0.0, first_token_at=1.0, last_token_at=2.0),
        RequestRun("c", PROMPT, [1, 2], arrived_at=0.5, first_token_at=4.0, last_token_at=5.0),
        RequestRun("d", PROMPT, [1], arrived_at=2.0, first_token_at=6.0, last_token_at=6.0),
    ]
    begins = [float(number) for number in range(6)]
    recording = Recording(steps, begins, [begin + 1 for begin in begins], [])
    return StrategyRun("static", 2, requests, recording)
