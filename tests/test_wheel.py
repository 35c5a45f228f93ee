"""The wheel, built from the tree and tried where nothing else of this project is.

Its environment has a wheel's own files, and borrows the dependencies of the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

import httpx
import pytest

from inflight import __version__

ROOT = Path(__file__).parent.parent
DEPENDENCIES = Path(sysconfig.get_path("purelib"))
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "node_modules", "build", "dist", "*.egg-info", "docs"
)
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SECONDS = 240.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves files in the tree, and takes what an earlier build left there."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)
    command = [sys.executable, "-P", "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    shutil.rmtree(source)
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """A virtual environment with the wheel, without the tree."""
    folder = wheel.parent / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run(command, check=True, timeout=SECONDS)
    # A folder named in such a file is only searched: the editable install that it may have is not obeyed.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n", encoding="utf-8")
    assert not (DEPENDENCIES / "inflight").exists()
    return folder


@pytest.fixture(scope="module")
def empty(wheel: Path) -> Path:
    folder = wheel.parent / "empty"
    folder.mkdir()
    return folder


def variables() -> dict[str, str]:
    """A user's environment; compiled kernels come from the tests' cache."""
    dropped = re.compile("PYTHON|INFLIGHT_(?!CACHE)")
    return {name: value for name, value in os.environ.items() if not dropped.match(name)}


def run(environment: Path, folder: Path, *command: str) -> str:
    done = subprocess.run(
        [str(environment / "bin" / command[0]), *command[1:]],
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "inflight"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {path.relative_to(ROOT).as_posix() for path in files}
    for suffix in (".py", ".cpp", ".h", ".js", ".css", ".safetensors", "py.typed"):
        assert any(name.endswith(suffix) for name in names), suffix


def test_wheel_metadata_is_complete(wheel: Path) -> None:
    information = f"inflight_llm-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"{information}/METADATA"))
        commands = archive.read(f"{information}/entry_points.txt").decode()
        assert f"{information}/licenses/LICENSE" in archive.namelist()
    assert (metadata["Name"], metadata["Version"]) == ("inflight-llm", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "inflight = inflight.__main__:main" in commands
    assert {"server", "constraints", "otel", "ray"} <= set(metadata.get_all("Provides-Extra", []))


def test_compare_works_from_the_wheel(environment: Path, empty: Path) -> None:
    where = run(environment, empty, "python", "-c", "import inflight; print(inflight.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    small = ("--requests", "2", "--batch-size", "2", "--max-tokens", "4", "--strategies", "static,continuous")
    found = json.loads(run(environment, empty, "inflight", "compare", *small, "--json", "--html", "x.html"))
    assert list(found["strategies"]) == ["static", "continuous"]
    assert [path.name for path in empty.iterdir()] == ["x.html"]


@contextmanager
def serving(environment: Path, folder: Path) -> Iterator[str]:
    command = [str(environment / "bin" / "inflight"), "serve", "--port", "0", "--num-blocks", "64"]
    with subprocess.Popen(command, cwd=folder, env=variables(), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while said.count("curl") < 2:
                line = process.stderr.readline()
                assert line, f"it ended: {said}"
                said += line
            yield re.findall(r"(http://\S+)/metrics", said)[0]
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def test_serve_works_from_the_wheel(environment: Path, empty: Path) -> None:
    with serving(environment, empty) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
        answer = http.post("/v1/completions", json={"prompt": "A fox", "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        assert "<html" in http.get("/").text
