"""Processes, looked at from outside. They may end while one looks."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def children(of: int | None = None, running: str = "") -> set[int]:
    """The processes that a process has started, by default this one: all, or those with a word in their command."""
    child_ids = set()
    for task in Path(f"/proc/{of or os.getpid()}/task").glob("*/children"):  # of each thread
        with contextlib.suppress(OSError):
            child_ids |= {child for child in map(int, task.read_text().split()) if _has(child, running)}
    return child_ids


def _has(process_id: int, word: str) -> bool:
    """Whether the word is in its command, which is empty for a moment while it starts, and once it has ended."""
    try:
        while not (command := Path(f"/proc/{process_id}/cmdline").read_bytes()) and runs(process_id):
            time.sleep(0.001)
    except OSError:
        return False
    return word.encode() in command


def exists(process_id: int) -> bool:
    """Whether there is such a process, be it as a zombie."""
    return Path(f"/proc/{process_id}").exists()


def runs(process_id: int) -> bool:
    """Whether it does something: an orphan may stay a zombie where nobody waits for orphans."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
