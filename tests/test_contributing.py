"""What contributors are given runs the gate's own tools."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_everything_that_tests_need_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    needed: set[tuple[str, str]] = set()
    asked = [("inflight-llm", "dev")]
    while asked:
        if (package := asked.pop()) not in needed:
            needed.add(package)
            asked += _required(*package)
    assert len(needed) > 100
    assert {name for name, _ in needed} - pins == {"inflight-llm"}


def _required(package: str, extra: str) -> list[tuple[str, str]]:
    """The packages that one brings along here, each with each of the extras asked of it and, as "", without any."""
    lines = [Requirement(line) for line in metadata.requires(package) or ()]
    here = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": extra})]
    return [(canonicalize_name(line.name), wish) for line in here for wish in ("", *line.extras)]
