"""The benchmark itself: what it prints, and that a row that cannot be measured costs no other row."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import offline
from benchmarks.shapes import SHAPES

TINY = {
    **SHAPES["qwen3-0.6b"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", TINY)
    sizes = offline.Sizes(4, 3, 9, 8, 8, 24, (2, 24), (3, 40, 4, 5), (1, 2), (1, 2))
    monkeypatch.setattr(offline, "CPU", sizes)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", "--device", "cpu", "--repeat", "1", "--json", *arguments])
    offline.main()


def test_every_workload_has_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--workload", "decode", "long", "prefill", "ragged", "agent", "--batch", "1", "3")
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["workload"], row["batch"]) for row in rows] == [
        ("decode", 1),
        ("decode", 3),
        ("long", 1),
        ("long", 2),
        ("prefill", 2),
        ("ragged", 4),
        ("agent", 3),
    ]
    assert all(
        row.get("step_ms", row.get("output_tokens_per_s", row.get("prompt_tokens_per_s"))) > 0 for row in rows
    )


def test_failing_row_does_not_affect_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three requests in two places never decode all at once.
    with pytest.raises(SystemExit, match="1 rows could not be measured"):
        run(monkeypatch, "--workload", "decode", "prefill", "--batch", "2", "3", "--max-num-seqs", "2")
    printed = capsys.readouterr()
    assert [row["workload"] for row in json.loads(printed.out)["results"]] == ["decode", "prefill"]
    assert "no step in which all 3 requests decoded" in printed.err
