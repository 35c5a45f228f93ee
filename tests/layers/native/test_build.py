"""Building, finding and not finding the compiled library."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.layers.native import build as build_module
from inflight.layers.native.build import NativeBuildError, build, build_key, cache_folder, find_compiler
from inflight.layers.native.library import Library, open_library


@pytest.fixture(scope="module")
def compiler() -> str:
    actual = find_compiler()
    if actual is None:
        pytest.skip("no compiler here")
    return actual


@pytest.fixture(scope="module", autouse=True)
def in_a_hurry() -> Iterator[None]:
    """Built without optimization, which takes the compiler most of its time; all other tests use one built with it."""
    flags = ["-O0" if flag == "-O3" else flag for flag in build_module.COMPILE_FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "COMPILE_FLAGS", tuple(flags))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "native"


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_library_is_built_once(compiler: str, folder: Path) -> None:
    library = build(compiler, folder)
    made = library.stat().st_mtime_ns
    assert build(compiler, folder) == library
    assert library.stat().st_mtime_ns == made
    assert [entry.name for entry in folder.iterdir()] == [library.name]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_library_loads(compiler: str, folder: Path) -> None:
    assert Library(build(compiler, folder)).panel >= 8


def cut(library: Path) -> None:
    os.truncate(library, 5000)


def empty(library: Path) -> None:
    os.truncate(library, 0)


def change(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def without_symbols(library: Path) -> None:
    subprocess.run(["c++", "-shared", "-x", "c++", os.devnull, "-o", str(library)], check=True)


@pytest.mark.parametrize("damage", [cut, empty, change, without_symbols])
def test_damaged_library_is_rebuilt_once(
    damage: Callable[[Path], None],
    compiler: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, cache = build(compiler, folder), tmp_path / "native"
    # The compiler's part takes long, and is the same each time.
    monkeypatch.setattr(
        build_module, "_compile", lambda _, scratch, _sources: Path(shutil.copy(good, scratch))
    )
    library = build(compiler, cache)
    damage(library)
    for _ in range(2):
        assert open_library(compiler, cache) is not None
        assert [entry.name for entry in cache.iterdir()] == [good.name]
        assert caplog.text.count("compiled again") == 1


def test_library_without_its_functions_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hollow = script(
        tmp_path / "hollow",
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && exec c++ -shared -x c++ /dev/null -o "$2"; shift; done; exit 0',
    )
    assert open_library(hollow, tmp_path / "cache") is None
    assert "has no function inflight_panel" in caplog.text


def test_leftovers_of_killed_compilations_are_removed(compiler: str, folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "native"
    build(compiler, folder)
    shutil.copytree(folder, cache)
    old, new = cache / "building-old", cache / "building-new"
    for left in (old, new):
        left.mkdir()
        (left / "library.so").touch()
    os.utime(old, (0, 0))
    library = build(compiler, cache)
    assert {entry.name for entry in cache.iterdir()} == {library.name, new.name}, (
        "someone may work in the new one"
    )


def test_cache_key_depends_on_the_compiler(compiler: str, tmp_path: Path) -> None:
    other = script(tmp_path / "other", "echo another compiler")
    assert build_key(compiler) != build_key(other)


def test_missing_compiler_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_library(None, tmp_path) is None
        assert open_library(str(tmp_path / "missing"), tmp_path) is None
    assert len(caplog.records) == 2
    assert "no C++ compiler was found" in caplog.text


def test_failing_compiler_is_a_warning_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = script(tmp_path / "broken", '[ "$1" = --version ] || { echo it is broken >&2; exit 3; }')
    with caplog.at_level(logging.WARNING):
        assert open_library(broken, tmp_path / "cache") is None
    assert "it is broken" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_unusable_compiler_output_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Its "library" exists and cannot be loaded.
    rubbish = script(
        tmp_path / "rubbish",
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done; exit 0',
    )
    with caplog.at_level(logging.WARNING):
        assert open_library(rubbish, tmp_path / "cache") is None
    assert len(caplog.records) == 1


def test_cache_folder_writable_by_others_is_rejected(compiler: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NativeBuildError, match="must not be writable by others"):
        build(compiler, tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/inflight/native")
    monkeypatch.setenv("INFLIGHT_CACHE", "/own")
    assert cache_folder() == Path("/own/native")


def test_named_compiler_takes_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = script(tmp_path / "named", "exit 0")
    monkeypatch.setenv("CXX", named)
    assert find_compiler() == named
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert find_compiler() is None


def test_environment_variable_disables_the_library() -> None:
    code = "from inflight.layers.native.library import native_library; print(native_library())"
    environment = {**os.environ, "INFLIGHT_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


def test_library_uses_no_strings_or_streams(compiler: str, folder: Path) -> None:
    """Where a process has loaded another C++ library before, as torch for CUDA does, these may be that library's, and
    crash."""
    names = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", build(compiler, folder)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "_ZSt9terminatev" in names
    assert not [name for name in names.split() if "basic_" in name or "locale" in name]
