"""With pipeline stages, steps that are computed at once share no request."""

from __future__ import annotations

import pytest

from tests.scheduling.staged import StagedRunner
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request


def staged(num_stages: int, **options: int) -> FakeEngine:
    return FakeEngine(
        pipeline_depth=num_stages,
        num_stages=num_stages,
        make_runner=StagedRunner,
        num_blocks=200,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_requests", [1, 2, 5, 8])
def test_every_step_has_its_share_of_the_decodes(num_stages: int, num_requests: int) -> None:
    engine = staged(num_stages)
    requests = [engine.add(make_request([7, index, 3], 20)) for index in range(num_requests)]
    engine.run()
    for request in requests:
        assert engine.outputs[request.request_id] == expected_tokens(request.token_ids[:3], 20)
    assert isinstance(engine.runner, StagedRunner)
    steady = [len(batch) for batch in engine.runner.batches[num_stages * 4 : num_stages * 10]]
    assert max(steady) <= -(-num_requests // num_stages)
    if num_requests % num_stages == 0:
        assert set(steady) == {num_requests // num_stages}


def test_prompt_chunks_do_not_stall_decodes() -> None:
    engine = staged(2, max_num_batched_tokens=8)
    streams = [engine.add(make_request([index], 30)) for index in range(4)]
    for _ in range(6):
        engine.take(engine.core.step())
    long = [engine.add(make_request([index] * 40, 2)) for index in range(4)]
    before = sum(len(engine.outputs[r.request_id]) for r in streams)
    for _ in range(10):
        engine.take(engine.core.step())
    assert sum(len(engine.outputs[r.request_id]) for r in streams) - before >= 16  # 2 in each step
    engine.run()
    for request in (*streams, *long):
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert engine.outputs[request.request_id] == expected_tokens(prompt, request.max_tokens)


def test_nothing_is_delayed_while_a_stage_is_idle() -> None:
    engine = staged(2)
    engine.add(make_request([1, 2, 3], 4))
    engine.add(make_request([1, 2, 3], 4))
    engine.core.step()
    assert engine.core.schedule_delay() == 0
