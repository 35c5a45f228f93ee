"""`inflight compare` from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inflight.cli.main import main

ROOT = Path(__file__).parents[3]
SMALL = ("compare", "--num-requests", "4", "--max-num-seqs", "2", "--max-tokens", "8")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["inflight", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_prints_table_and_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SMALL) == 0
    text = capsys.readouterr().out
    for words in (
        "4 requests in one burst, 2 slots",
        "sequential",
        "static",
        "continuous",
        "slot use",
        "KV waste",
    ):
        assert words in text
    assert "the same tokens under every strategy" in " ".join(text.split())


def test_json_is_the_only_output_and_the_page_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "x.html"
    assert run(monkeypatch, *SMALL, "--json", "--strategies", "static,continuous", "--html", page) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["strategies"]) == ["static", "continuous"]
    assert report["model"] == "the built-in model"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_rerank_workload_uses_the_built_in_reranker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "x.html"
    arguments = ("--workload", "rerank", "--requests", "4", "--batch-size", "2", "--html", page)
    assert run(monkeypatch, "compare", *arguments) == 0
    text = capsys.readouterr().out
    for words in (
        "4 pairs in one burst, 2 slots, the built-in reranker",
        "pairs/s",
        "first result",
        "padding",
    ):
        assert words in text
    assert "the same score under every strategy" in " ".join(text.split())
    assert "computing padding" in page.read_text(encoding="utf-8")


def test_quiet_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--quiet", "--strategies", "continuous", "--lengths", "ragged", "--temperature", "0")
    assert run(monkeypatch, *SMALL, *arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arrival", "sometimes"), "it must be burst, or poisson:RATE"),
        (("--arrival", "poisson:-3"), "it must be burst, or poisson:RATE"),
        (("--lengths", "endless"), "allowed are real, ragged"),
        (("--strategies", "best"), "best"),
        (("--strategies", ","), "at least one"),
        (("--strategies", "static,static"), "none of them twice"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--html", "no/such/folder/x.html"), "an existing folder"),
        (("--html", "."), "an existing folder"),
        (("--workload", "sums"), "it must be chat or rerank"),
        (("--workload", "rerank", "--max-tokens", "8"), "apply to generated answers"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert run(monkeypatch, "compare", *arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("inflight: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--num-requests", "--max-num-seqs"])
def test_out_of_range_numbers_are_usage_errors(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    assert run(monkeypatch, "compare", option, "0") == 2


def test_folder_without_a_model_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "compare", tmp_path) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_command_line_starts_without_torch() -> None:
    code = "import sys, inflight.cli.main; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


# Runs `inflight` where nothing but the named packages, and what those need themselves, can be imported.
BARE = """
import importlib.metadata as metadata, re, sys

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def required(name):
    for line in metadata.requires(name) or []:
        if not re.search("extra *==", line):
            yield normal(re.match(r"[\\w.-]+", line).group())

needed, todo = set(), list(map(normal, sys.argv[1].split(",")))
while todo:
    name = todo.pop()
    if name not in needed:
        needed.add(name)
        try:
            todo += required(name)
        except metadata.PackageNotFoundError:  # for another system
            pass
allowed = {
    module for module, owners in metadata.packages_distributions().items() if needed & set(map(normal, owners))
}
extras = set(metadata.packages_distributions()) - allowed - {"inflight", "__editable__"}

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in extras:
            raise ModuleNotFoundError(f"No module named {name!r}: it belongs to an extra", name=name)

sys.meta_path.insert(0, Forbid())
for module in sys.argv[2].split(","):
    try:
        __import__(module)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{module} can be imported")
sys.argv[1:] = sys.argv[3:]
from inflight.__main__ import main
main()
"""


def test_needs_no_extra(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = ",".join(re.split(r"[<>=\[ ]", line)[0] for line in project["dependencies"])
    options = [*SMALL, "--html", str(tmp_path / "x.html")]
    command = [sys.executable, "-c", BARE, installed, "fastapi,transformers,zmq", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.html").stat().st_size > 0
