"""Processes, observed through /proc. They may end in the meantime."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def children(of: int | None = None, running: str = "") -> set[int]:
    """Return the children of a process, by default of this one: all, or those with a word in their command."""
    child_ids = set()
    for task in Path(f"/proc/{of or os.getpid()}/task").glob("*/children"):  # of each thread
        with contextlib.suppress(OSError):
            child_ids |= {child for child in map(int, task.read_text().split()) if _has(child, running)}
    return child_ids


def _has(process_id: int, word: str) -> bool:
    """Return whether the word is in its command, which is empty for a moment while it starts, and after its end."""
    try:
        while not (command := Path(f"/proc/{process_id}/cmdline").read_bytes()) and runs(process_id):
            time.sleep(0.001)
    except OSError:
        return False
    return word.encode() in command


def exists(process_id: int) -> bool:
    """Return whether there is such a process, possibly a zombie."""
    return Path(f"/proc/{process_id}").exists()


def runs(process_id: int) -> bool:
    """Return whether it exists and is no zombie: an orphan may stay one if no process waits for orphans."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
