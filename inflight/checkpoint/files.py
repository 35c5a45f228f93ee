"""Reading the files of a model folder, which may be hostile.

    read_file     the bytes of a file, or None if it does not exist
    read_object   the JSON object in it
    read_list     the JSON list in it

A file must really be inside the folder, regular and of bounded size; errors are one line. A link out of the folder
could expose the server's own files to clients, and reading a device or a pipe may never end.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from inflight.errors import ModelError, clipped

MAX_CONFIG_BYTES = 32 << 20  # for configs, indexes and templates; the largest known have a tenth of this
MAX_TOKENIZER_BYTES = 256 << 20
MAX_DEPTH = 64  # of nested JSON


def inside(folder: Path, name: str, error: type[ModelError] = ModelError) -> Path:
    """Return the real path of a file, which need not exist, and check that it is inside the folder.

    The hub's cache keeps `snapshots/<revision>/<name>` as links into the `blobs` folder beside `snapshots`.
    """
    home = folder.resolve()
    try:
        real = (home / name).resolve()
    except (OSError, RuntimeError) as problem:  # a cycle of links
        raise error(f"{folder / name} cannot be resolved: {_line(problem)}") from problem
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise error(
            f"{folder / name} is a link out of its folder: a checkpoint's files must be in its own folder"
        )
    return real


def read_file(
    folder: Path, name: str, max_bytes: int = MAX_CONFIG_BYTES, error: type[ModelError] = ModelError
) -> bytes | None:
    """Return the contents of a file, or None if it does not exist."""
    path = inside(folder, name, error)
    try:
        # Opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise error(f"{folder / name} cannot be opened: {_line(problem)}") from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{folder / name} is not a regular file")
        if status.st_size > max_bytes:
            raise error(f"{folder / name} has {status.st_size} bytes: at most {max_bytes} are allowed")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    except OSError as problem:
        raise error(f"{folder / name} cannot be read: {_line(problem)}") from problem
    finally:
        os.close(descriptor)


def read_text(folder: Path, name: str) -> str | None:
    content = read_file(folder, name)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as problem:
        raise ModelError(f"{folder / name} is not UTF-8: {_line(problem)}") from problem


def read_object(folder: Path, name: str, error: type[ModelError] = ModelError) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if it does not exist."""
    value = _read_json(folder, name, error)
    if value is not None and not isinstance(value, dict):
        raise error(f"{folder / name} holds a {type(value).__name__}: it must be a JSON object")
    return value


def read_list(folder: Path, name: str, error: type[ModelError] = ModelError) -> list[Any] | None:
    """Return the JSON list in a file, or None if it does not exist."""
    value = _read_json(folder, name, error)
    if value is not None and not isinstance(value, list):
        raise error(f"{folder / name} holds a {type(value).__name__}: it must be a JSON list")
    return value


def _read_json(folder: Path, name: str, error: type[ModelError]) -> Any:
    """Return the JSON value in a file, or None if it does not exist. The value null is an error."""
    content = read_file(folder, name, error=error)
    if content is None:
        return None
    try:
        value = json.loads(content.decode())
        if _is_deeper_than(value, MAX_DEPTH):
            raise RecursionError
    except RecursionError:
        raise error(f"{folder / name} cannot be read as JSON: it is nested deeper than {MAX_DEPTH}") from None
    except ValueError as problem:
        raise error(f"{folder / name} cannot be read as JSON: {_line(problem)}") from problem
    if value is None:
        raise error(f"{folder / name} holds a NoneType: it must be a JSON object or list")
    return value


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
    return any(isinstance(node, dict | list) for node in level)


def _line(problem: BaseException) -> str:
    """Return the first line of a message, shortened."""
    lines = str(problem).strip().splitlines()
    return clipped(lines[0], 200) if lines else type(problem).__name__
