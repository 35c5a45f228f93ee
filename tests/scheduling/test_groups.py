"""Prefix hits and memory with several KV groups, counted in tokens and blocks on the fake model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request

LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"windows": (None, 12, 12)},
    "state": {"snapshot_blocks": 3},
    "both": {"windows": (None, 12), "snapshot_blocks": 2},
}


def engine_of(name: str, **options: Any) -> FakeEngine:
    sizes = {"num_blocks": 4000, "block_size": 4, "max_num_batched_tokens": 64}
    return FakeEngine(**sizes | LAYOUTS[name] | options)


def check_answers(engine: FakeEngine, prompts: dict[str, list[int]], count: int) -> None:
    for name, prompt in prompts.items():
        assert engine.outputs[name] == expected_tokens(prompt, count, layout=engine.layout)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("depth", [1, 2])
def test_conversation_computes_every_token_once(name: str, depth: int) -> None:
    """Up to the last, partly filled block of each turn."""
    engine, history, num_turns = engine_of(name, pipeline_depth=depth), [1, 2, 3], 20
    for turn in range(num_turns):
        request = engine.add(make_request(history, max_tokens=9))
        engine.run()
        history = [*history, *engine.outputs[request.request_id], turn, turn + 1, turn + 2]
    num_tokens = len(history) - 3 - 1  # the last output needs no KV
    assert engine.runner.num_computed <= num_tokens + num_turns * (engine.block_size + depth - 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_agents_with_a_common_prefix_compute_it_once(name: str) -> None:
    """All arrive at once, and the prefix takes several steps."""
    engine, shared, count = engine_of(name, max_num_seqs=32), [i % 50 for i in range(400)], 24
    prompts = {}
    for index in range(count):
        request = engine.add(make_request([*shared, index, *range(6)], max_tokens=5))
        prompts[request.request_id] = [*shared, index, *range(6)]
    engine.run()
    check_answers(engine, prompts, 5)
    num_new = len(shared) + count * (7 + 4)
    assert engine.runner.num_computed - num_new <= 16 * engine.block_size  # the interval between snapshots


def test_long_requests_hold_only_their_windows() -> None:
    engine = engine_of("full", windows=(8,), num_blocks=12, max_num_batched_tokens=16)
    request = engine.add(make_request([7] * 200, max_tokens=100))
    while engine.core.has_work:
        engine.step()
        if request.num_computed > 200:
            assert engine.scheduler.blocks.num_held(request) <= 3
    assert engine.outputs[request.request_id] == expected_tokens([7] * 200, 100, layout=engine.layout)
    assert engine.core.stats().num_preemptions == 0


@pytest.mark.parametrize("name", ["window", "state", "both"])
def test_same_prompts_share_what_the_first_one_computes(name: str) -> None:
    """As the answers of one request with n > 1: each of the others computes what follows the last full block."""
    engine, prompt = engine_of(name), [i % 7 for i in range(50)]
    prompts = {engine.add(make_request(prompt, max_tokens=6)).request_id: prompt for _ in range(5)}
    engine.run()
    check_answers(engine, prompts, 6)
    assert engine.runner.num_computed <= 50 + 4 * 2 + 5 * 5
