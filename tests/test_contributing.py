"""What contributors are given runs the gate's own tools."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_gate() -> None:
    workflow = _read(".github/workflows/test.yml")
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads the key `on` so
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"test": [".ci/run"], "docs": ["make docs"]}
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").endswith("exec make test\n")


def test_hooks_before_a_commit_are_the_gates() -> None:
    (repo,) = _read(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"  # another repository would bring other versions
    entries = {hook["entry"].replace(" --force-exclude", "") for hook in repo["hooks"]}
    gate = re.findall(r"^\t\$\(BIN\)/((?:ruff|mypy|lint-imports).*)$", MAKEFILE, re.M)
    assert len(gate) == 4
    assert entries == {f".venv/bin/{command.replace(' .', '').replace(' --check', '')}" for command in gate}


def test_commands_that_contributors_are_told_of_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^    )make (\w+)", text, re.M))
    assert {"setup", "test", "docs"} <= targets <= set(re.findall(r"^(\w+):", MAKEFILE, re.M))
    modules = re.findall(r"python -m ((?:benchmarks|tools)\.[a-z_]+)", text)
    assert len(modules) > 3
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []
