from __future__ import annotations

import pytest

from benchmarks.step_profile import NOTHING, WARM_UP, Interval, shares, short_name, start_decoding
from inflight.config import EngineConfig
from inflight.loading.load import load_engine


def test_shares_add_up_to_the_time_from_begin_to_end() -> None:
    events = [
        Interval("a", 0, 10),
        Interval("b", 4, 15),  # begins early: 6 of its 11 are hidden behind a
        Interval("c", 6, 12),  # all of it is hidden behind b
        Interval("a", 20, 30),
    ]
    by_name = {share.name: share for share in shares(reversed(events), 1)}
    assert {name: share.microseconds for name, share in by_name.items()} == {
        "a": 20,
        "b": 5,
        "c": 0,
        NOTHING: 5,
    }
    assert (by_name["b"].own, by_name["a"].count) == (11, 2)
    assert sum(share.microseconds for share in by_name.values()) == 30


def test_shares_are_of_a_step_and_the_largest_comes_first() -> None:
    kernel_shares = shares([Interval("a", 0, 1), Interval("b", 1, 5), Interval("b", 5, 9)], 2)
    assert [(share.name, share.microseconds, share.count) for share in kernel_shares] == [
        ("b", 4, 1),
        ("a", 0.5, 0.5),
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_decode", "_decode"),
        ("void at::native::kernel<4, at::foo<int, 3>(float)>(int, float*)", "kernel"),
        ("void cutlass::device_kernel<a<b<c>>>(Params)", "device_kernel"),
    ],
)
def test_names_fit_a_line(name: str, short: str) -> None:
    assert short_name(name) == short


def test_decoding_has_begun_and_goes_on() -> None:
    engine = load_engine(EngineConfig.create(max_num_seqs=4))
    core = start_decoding(engine, 3, 40, WARM_UP + 8)
    assert len(core.step()) == 3
    assert [request.num_output_tokens for request in core.scheduler.pool.running] == [WARM_UP + 1] * 3
    engine.close()
