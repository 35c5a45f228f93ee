from __future__ import annotations

import pytest

from inflight.compare.figures import figures
from tests.compare import hand_made


def test_every_figure_of_a_run_made_by_hand() -> None:
    found = figures(hand_made.run())
    assert found.total_time == 6.0
    assert found.num_output_tokens == 8
    assert found.tokens_per_second == pytest.approx(8 / 6)
    assert found.mean_ttft == pytest.approx((1 + 1 + 3.5 + 4) / 4)
    assert found.p99_ttft == pytest.approx(3.5 + 0.97 * 0.5)  # between the two largest, 3.5 and 4
    assert found.p50_latency == pytest.approx(3.5)  # of 2, 3, 4 and 4.5
    assert found.p99_latency == pytest.approx(4 + 0.97 * 0.5)
    assert found.num_steps == 6
    assert found.slot_use == pytest.approx(8 / 12)
    assert found.kv_waste == pytest.approx((0 + 0.5 + 0.5 + 0.5 + 1 + 1) / 6)
    assert found.gpu_utilization is None


def test_an_idle_step_lowers_slot_use() -> None:
    run = hand_made.run()
    run.steps.append(hand_made.step(6, []))
    assert figures(run).slot_use == pytest.approx(8 / 14)
