from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.cpu_peers import CONTESTS, MissingEngineError, Peers, decode_ms, figure, rows, started


def test_decode_step_is_timed_only_while_all_requests_decode() -> None:
    # A prompt step, one that ends the second prompt, two decode steps, and one after the first request has finished.
    result = {"ends": [1.0, 3.0, 3.5, 4.1, 9.0], "num_tokens": [1, 2, 2, 2, 1]}
    assert decode_ms(result, 2) == pytest.approx(550.0)


def test_missing_tokens_are_an_error_and_not_a_rate() -> None:
    result = {"seconds": 2.0, "ends": [1.0, 2.0], "num_tokens": [1, 2]}
    work = {"prompts": [[1], [2]], "output_lens": [2, 2]}
    with pytest.raises(MissingEngineError, match="3 tokens were generated instead of 4"):
        figure("ragged 2", result, work)


def test_engine_without_an_interpreter_is_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "openvino-bf16").mkdir()
    options = argparse.Namespace(
        openvino_python=None, llama_python=None, sentence_python=None, threads=1, openvino_tokens=256
    )
    missing: list[str] = []
    engines = tuple(engine for engine in CONTESTS["bf16"] if engine.kind == "openvino")
    with started(engines, Peers(options, tmp_path), 1, {}, missing) as running:
        assert not running
    assert missing == ["openvino bf16: no interpreter with openvino was named"]


def test_ratio_is_that_of_the_medians() -> None:
    figures = {
        "inflight bf16": {"decode 1": [30.0, 20.0, 90.0], "ragged 16": [90.0, 120.0, 130.0]},
        "openvino bf16": {"decode 1": [40.0, 60.0, 70.0], "ragged 16": [100.0, 60.0, 110.0]},
    }
    ratios = {
        (name, workload): ratio for name, workload, _, _, ratio, _ in rows("bf16", {"figures": figures})
    }
    assert ratios["inflight bf16", "decode 1"] == pytest.approx(0.5)
    assert ratios["inflight bf16", "ragged 16"] == pytest.approx(1.2)
    assert ratios["openvino bf16", "decode 1"] == "-"
