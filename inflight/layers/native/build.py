"""Compile the C++ of this folder into a shared library, once per combination of source, compiler and processor."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inflight.errors import InflightError

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "gcc", "clang++")
# Multiply-adds are fused wherever they are written as such, and nothing is reordered: the same source rounds equally in
# every template instance.
COMPILE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-pthread")
# The first of each group that the compiler accepts is used.
OPTIONAL_FLAGS = (("-march=native", "-mcpu=native"), ("-mprefer-vector-width=512",))
TIMEOUT = 300.0  # seconds for one run of the compiler, on a machine that may be busy
SCRATCH = "building-"  # prefix of the folders in which libraries are built
MAX_SCRATCH_AGE = 3600.0  # seconds after which such a folder is a leftover


class NativeBuildError(InflightError):
    """The library cannot be built here. Callers fall back to torch."""


def find_compiler() -> str | None:
    """Return the compiler to use: CXX if it is set, otherwise the first known one on the path."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, COMPILERS)), None)


def cache_folder() -> Path:
    """Return the folder in which built libraries are cached."""
    folder = os.environ.get("INFLIGHT_CACHE")
    if folder:
        return Path(folder) / "native"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "inflight" / "native"


def build(compiler: str, folder: Path, sources: Path = SOURCE_FOLDER) -> Path:
    """Return the library of a folder of sources in `folder`, compiling it unless an undamaged one exists."""
    prepare_folder(folder)
    _remove_leftovers(folder)
    key = build_key(compiler, sources)
    for library in sorted(folder.glob(f"inflight-{key}-*.so")):
        if library.name == _name(key, library):
            return library
        logger.warning("the compiled library %s is damaged and will be compiled again", library)
        library.unlink()
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
        library = _compile(compiler, Path(scratch), sources)
        target = folder / _name(key, library)
        _sync(library)
        os.replace(library, target)  # atomic: other processes see all of it or nothing
    _sync(folder)
    return target


def _name(key: str, library: Path) -> str:
    """Return the file name, which contains a hash of the content. A truncated or changed file has the wrong name and is
    never loaded: mapping a file that is too short would crash the process with SIGBUS."""
    return f"inflight-{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _sync(path: Path) -> None:
    """Flush to disk, so that a power loss cannot leave a name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of killed compilations."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process may be removing it, too
            if time.time() - scratch.stat().st_mtime > MAX_SCRATCH_AGE:
                shutil.rmtree(scratch, ignore_errors=True)


def prepare_folder(folder: Path) -> None:
    """Create `folder`. Raises if another user could have put a library there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeBuildError(
            f"cache folder {folder} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}: "
            f"it must belong to user {os.getuid()} and must not be writable by others"
        )


def build_key(compiler: str, sources: Path = SOURCE_FOLDER) -> str:
    """Return a key that changes with everything that could change the library."""
    digest = hashlib.sha256()
    for source in [*_sources(sources), *sorted(sources.glob("*.h"))]:
        digest.update(source.read_bytes())
    recipe = (COMPILE_FLAGS, OPTIONAL_FLAGS, _run([compiler, "--version"]), _processor())
    digest.update(repr(recipe).encode())
    return digest.hexdigest()[:24]


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cpp"))


def _processor() -> str:
    """Return a description of the processor, on which `-march=native` depends."""
    fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def _compile(compiler: str, scratch: Path, folder: Path) -> Path:
    flags = list(COMPILE_FLAGS)
    for group in OPTIONAL_FLAGS:
        flags += next(([flag] for flag in group if _accepts(compiler, flag)), [])
    sources = _sources(folder)
    objects = [str(scratch / f"{source.stem}.o") for source in sources]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", made]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # more at once would only make each of them slower
        list(pool.map(_run, commands))
    library = scratch / "library.so"
    # gcc compiles C++, too, but does not link its standard library by default.
    standard = ["-lstdc++"] if Path(compiler).name.startswith("gcc") else []
    _run([compiler, "-shared", "-pthread", *objects, "-o", str(library), *standard])
    return library


def _accepts(compiler: str, flag: str) -> bool:
    try:
        _run([compiler, flag, "-Werror", "-fsyntax-only", "-x", "c++", os.devnull])
    except NativeBuildError:
        return False
    return True


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise NativeBuildError(f"{' '.join(command)} returned {done.returncode}:\n{tail}")
    return done.stdout
