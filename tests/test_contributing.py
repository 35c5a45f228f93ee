"""What contributors are given runs the gate's own tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RunShell = Callable[[str], subprocess.CompletedProcess[str]]


def _read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_workflow_runs_the_gate() -> None:
    workflow = _read(".github/workflows/test.yml")
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads the key `on` so
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"test": [".ci/run"], "docs": ["make docs"]}
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "\nexec .ci/new-machine make test test-clients" in script.read_text(encoding="utf-8")


@pytest.fixture(params=["mounts", "no-mounts"])
def new_machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunShell:
    """A function that runs a shell command by the script in a repository below the temporary directory."""
    repository, tools = tmp_path / "repository", tmp_path / "tools"
    (repository / ".ci").mkdir(parents=True)
    (repository / "marker").write_text("visible")
    script = shutil.copy(ROOT / ".ci" / "new-machine", repository / ".ci")
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for name in ("TMPDIR", "PIP_CONFIG_FILE", "PIP_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "no-mounts":
        (tools / "unshare").write_text("#!/bin/sh\nexit 1\n")
        (tools / "unshare").chmod(0o755)
    elif subprocess.run(
        ["unshare", "--mount", "mount", "--bind", "/var", "/var"], capture_output=True
    ).returncode:
        pytest.skip("mounts are not allowed here")

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, "sh", "-c", command], capture_output=True, text=True, timeout=60)

    return run


def test_new_machine_has_an_empty_home_and_temporary_directory(new_machine: RunShell) -> None:
    files = 'ls -A "$HOME"; find "${TMPDIR:-/tmp}" -type f | grep -v /marker$ | grep -v /.ci/new-machine$'
    done = new_machine(
        f'echo "$HOME"; echo "${{TMPDIR:-/tmp}}"; cat marker; echo; {files}; touch "$HOME/left"; exit 7'
    )
    home, temporary, *rest = done.stdout.splitlines()
    assert (rest, done.returncode) == (["visible"], 7), done
    assert home != os.environ["HOME"]
    assert ("empty /tmp" in done.stderr) == (temporary == "/tmp")
    assert not Path(home).exists(), "removed at the end"
    assert temporary == "/tmp" or not Path(temporary).exists()


def test_new_machine_leaves_the_repository_in_place(new_machine: RunShell, tmp_path: Path) -> None:
    assert new_machine('touch made; touch "${TMPDIR:-/tmp}/temporary"').returncode == 0
    assert {path.name for path in (tmp_path / "repository").iterdir()} == {".ci", "marker", "made"}


def test_new_machine_gets_packages_from_where_the_old_one_does(new_machine: RunShell, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        done = new_machine(
            'echo "$PIP_CONFIG_FILE"; echo "$PIP_CACHE_DIR"; ls "$PIP_CONFIG_FILE"; ls -A "$HOME"'
        )
    configuration = str(home / ".config/pip/pip.conf")
    assert done.stdout.splitlines() == [configuration, str(home / ".cache/pip"), configuration], done


def test_commit_hooks_match_the_gate() -> None:
    (repo,) = _read(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"  # another repository would bring other versions
    entries = {hook["entry"].replace(" --force-exclude", "") for hook in repo["hooks"]}
    gate = re.findall(r"^\t\$\(BIN\)/((?:ruff|mypy|lint-imports).*)$", MAKEFILE, re.M)
    assert len(gate) == 4
    assert entries == {f".venv/bin/{command.replace(' .', '').replace(' --check', '')}" for command in gate}


def test_documented_commands_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^    )make ([\w-]+)", text, re.M))
    assert {"setup", "test", "docs"} <= targets <= set(re.findall(r"^([\w-]+):", MAKEFILE, re.M))
    modules = re.findall(r"python -m ((?:benchmarks|tools)\.[a-z_]+)", text)
    assert len(modules) > 3
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pins_can_be_installed_from_the_package_index_alone(python: str, tmp_path: Path) -> None:
    """uv reads only metadata, so that nothing large is downloaded, and resolves for other Pythons than this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--constraint",
        "constraints.txt",
    ]
    command += ["--quiet", "--no-config", "--all-extras", "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--output-file", str(tmp_path / "resolved.txt")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
    resolved = re.findall(r"^([\w.-]+)==", (tmp_path / "resolved.txt").read_text(), re.M)
    pins = {canonicalize_name(line.split("==")[0]) for line in CONSTRAINTS if "==" in line}
    assert len(resolved) > 100
    if python == "3.11":  # which CI runs; others need a few packages more
        names = {canonicalize_name(name) for name in resolved}
        # torch pins the packages of CUDA itself.
        assert sorted(name for name in names - pins if not name.startswith(("cuda-", "nvidia-"))) == []
