"""`inflight quantize` and `inflight eval`, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from inflight.cli.main import app
from tests.support.checkpoints import write_checkpoint, write_tokenizer


def test_quantized_copy_is_compared_with_its_original(tmp_path: Path) -> None:
    folder, out, text = tmp_path / "model", tmp_path / "out", tmp_path / "text.txt"
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    text.write_text("The dog does not mind. " * 20)
    run = CliRunner()
    quantized = run.invoke(app, ["quantize", str(folder), str(out), "--format", "int8"])
    assert quantized.exit_code == 0, quantized.output
    arguments = ["eval", str(out), "--text", str(text), "--reference", str(folder), "--device", "cpu"]
    shown = run.invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "KL divergence" in shown.output
    result = json.loads(run.invoke(app, [*arguments, "--json"]).stdout.splitlines()[-1])
    assert 0 < result["agreement"]["divergence"] < 0.05
    on_loading = [
        "eval",
        str(folder),
        "--text",
        str(text),
        "--quantization",
        "int8",
        "--device",
        "cpu",
        "--json",
    ]
    other = json.loads(run.invoke(app, on_loading).stdout.splitlines()[-1])
    assert abs(other["perplexity"] / result["perplexity"] - 1) < 1e-3


def test_unknown_format_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", "m", str(tmp_path / "out"), "--format", "int2"])
    assert result.exit_code != 0
    assert "--format is 'int2': it must be one of fp8, int8, int4" in f"{result.output}{result.exception}"
