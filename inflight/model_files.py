"""Reading the files of a model folder, which may come from anyone.

    read_file     the bytes of a file, or None where there is none
    read_object   the JSON object in it
    read_list     the JSON list in it

A file must be in the folder for real, regular and of bounded size; what is wrong with it is told in one line.
A link that leads out of the folder would let a checkpoint show the server's own files to its clients; a device or a
pipe never ends.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from inflight.errors import ModelError

MAX_CONFIG_BYTES = (
    32 << 20
)  # of a configuration, an index or a template: the largest known have a tenth of it
MAX_TOKENIZER_BYTES = 256 << 20
MAX_DEPTH = 64  # of nested JSON


def inside(folder: Path, name: str, error: type[ModelError] = ModelError) -> Path:
    """The path of a file, which may or may not exist, if it is in the folder for real.

    The hub's cache keeps `snapshots/<revision>/<name>` as links into the `blobs` folder beside `snapshots`.
    """
    home = folder.resolve()
    try:
        real = (home / name).resolve()
    except (OSError, RuntimeError) as problem:  # links in a circle
        raise error(f"{folder / name} cannot be followed: {_line(problem)}") from problem
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
    """What is in a file of a model folder."""
    path = inside(folder, name, error)
    try:
        # Without waiting: whoever opens a pipe waits for a writer.
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
            raise error(f"{folder / name} has {status.st_size} bytes: at most {max_bytes} are read")
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
    """The JSON object in a file."""
    value = _read_json(folder, name, error)
    if value is not None and not isinstance(value, dict):
        raise error(f"{folder / name} holds a {type(value).__name__}: it must be a JSON object")
    return value


def read_list(folder: Path, name: str, error: type[ModelError] = ModelError) -> list[Any] | None:
    """The JSON list in a file."""
    value = _read_json(folder, name, error)
    if value is not None and not isinstance(value, list):
        raise error(f"{folder / name} holds a {type(value).__name__}: it must be a JSON list")
    return value


def _read_json(folder: Path, name: str, error: type[ModelError]) -> Any:
    """None where there is no such file, which no file can say otherwise: null is an error."""
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
            for found in level
            if isinstance(found, dict | list)
            for item in (found.values() if isinstance(found, dict) else found)
        ]
    return any(isinstance(found, dict | list) for found in level)


def _line(problem: BaseException) -> str:
    """The first line of a message, cut short."""
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__
