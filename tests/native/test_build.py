"""Building, finding and not finding the compiled library."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.native.build import NativeBuildError, build, build_key, cache_folder, find_compiler
from inflight.native.library import Library, open_library


@pytest.fixture(scope="module")
def compiler() -> str:
    found = find_compiler()
    if found is None:
        pytest.skip("no compiler here")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "native"


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_once(compiler: str, folder: Path) -> None:
    library = build(compiler, folder)
    made = library.stat().st_mtime_ns
    assert build(compiler, folder) == library
    assert library.stat().st_mtime_ns == made
    assert [entry.name for entry in folder.iterdir()] == [library.name]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_library_loads(compiler: str, folder: Path) -> None:
    assert Library(build(compiler, folder)).panel >= 8


def test_the_key_knows_the_compiler(compiler: str, tmp_path: Path) -> None:
    other = script(tmp_path / "other", "echo another compiler")
    assert build_key(compiler) != build_key(other)


def test_no_compiler_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_library(None, tmp_path) is None
        assert open_library(str(tmp_path / "missing"), tmp_path) is None
    assert len(caplog.records) == 2
    assert "no C++ compiler was found" in caplog.text


def test_a_failing_compiler_is_a_warning_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = script(tmp_path / "broken", '[ "$1" = --version ] || { echo it is broken >&2; exit 3; }')
    with caplog.at_level(logging.WARNING):
        assert open_library(broken, tmp_path / "cache") is None
    assert "it is broken" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_makes_rubbish_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Its "library" exists and cannot be loaded.
    rubbish = script(
        tmp_path / "rubbish",
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done; exit 0',
    )
    with caplog.at_level(logging.WARNING):
        assert open_library(rubbish, tmp_path / "cache") is None
    assert len(caplog.records) == 1


def test_a_folder_that_others_may_write_is_refused(compiler: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NativeBuildError, match="writable by no one else"):
        build(compiler, tmp_path)


def test_where_libraries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/inflight/native")
    monkeypatch.setenv("INFLIGHT_CACHE", "/own")
    assert cache_folder() == Path("/own/native")


def test_a_named_compiler_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = script(tmp_path / "named", "exit 0")
    monkeypatch.setenv("CXX", named)
    assert find_compiler() == named
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert find_compiler() is None


def test_the_environment_forbids_the_library() -> None:
    code = "from inflight.native.library import native_library; print(native_library())"
    environment = {**os.environ, "INFLIGHT_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
