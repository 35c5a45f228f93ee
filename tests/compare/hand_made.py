"""A hand-made run of four requests in two slots:

step      0  1  2  3  4  5
slot 0    P  a  a  P  c           a has 3 tokens, c has 2
slot 1    P  b  .  .  P  P        b has 2 tokens and holds its slot until step 3 is over; d's prompt takes two steps
"""

from __future__ import annotations

from inflight.compare.measure import RequestRun, StrategyRun
from inflight.events import KVUsage, SlotRecord, StepRecord

PROMPT = 10


def step(number: int, slots: list[SlotRecord], idle: tuple[int, ...] = (), num_tokens: int = 8) -> StepRecord:
    kv = KVUsage(num_blocks=8, num_empty=7, num_cached=0, num_used=1, block_size=16, num_tokens=num_tokens)
    return StepRecord(number, 0.0, float(number + 1), tuple(slots), (), (), (), idle, 0, 0, kv)


def prompt(row: int, request_id: str, start: int = 0, count: int = PROMPT) -> SlotRecord:
    return SlotRecord(row, request_id, start, count, samples=start + count == PROMPT, decodes=False)


def token(row: int, request_id: str, number: int) -> SlotRecord:
    """Return the slot of a step that computes output `number` and produces the next one."""
    return SlotRecord(row, request_id, PROMPT + number, 1, samples=True, decodes=True)


def run() -> StrategyRun:
    steps = [
        step(0, [prompt(0, "a"), prompt(1, "b")], num_tokens=16),
        step(1, [token(0, "a", 0), token(1, "b", 0)], idle=(1,)),
        step(2, [token(0, "a", 1)], idle=(1,)),
        # The batch ends here: the row is released in this step's update, but was held during the step.
        step(3, [prompt(0, "c")], idle=()),
        step(4, [token(0, "c", 0), prompt(1, "d", 0, 4)], num_tokens=0),
        step(5, [prompt(1, "d", 4, 6)], num_tokens=0),
    ]
    requests = [
        RequestRun("a", PROMPT, [1, 2, 3], arrived_at=0.0, first_token_at=1.0, last_token_at=3.0),
        RequestRun("b", PROMPT, [1, 2], arrived_at=0.0, first_token_at=1.0, last_token_at=2.0),
        RequestRun("c", PROMPT, [1, 2], arrived_at=0.5, first_token_at=4.0, last_token_at=5.0),
        RequestRun("d", PROMPT, [1], arrived_at=2.0, first_token_at=6.0, last_token_at=6.0),
    ]
    begins = [float(number) for number in range(6)]
    return StrategyRun("static", 2, requests, steps, begins, [begin + 1 for begin in begins])
