"""Memory of this machine: how much is available, and how much processes use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CONTAINER = Path("/sys/fs/cgroup")
PROCESSES = Path("/proc")


def available_memory() -> int:
    """Return the bytes of RAM available without swapping, within the limits of a container."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, IndexError, ValueError):
        kilobytes = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        available = int(kilobytes) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max": the container has no limit itself
        limit = int((CONTAINER / "memory.max").read_text())
        available = min(available, limit - int((CONTAINER / "memory.current").read_text()) + _page_cache())
    return available


def _page_cache() -> int:
    """Return the bytes of the page cache. They count as used by the container, which has just read all its weights."""
    lines = map(str.split, (CONTAINER / "memory.stat").read_text().splitlines())
    return sum(int(size) for name, size in lines if name in ("active_file", "inactive_file"))


def used_memory(process_id: int) -> int:
    """Return the bytes of RAM that a process and its descendants use, without mapped files."""
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            lines = (line.split() for line in (folder / "status").read_text().splitlines())
            fields = {words[0]: int(words[1]) for words in lines if words and words[0] in _STATUS_FIELDS}
            parents[int(folder.name)] = fields.get("PPid:", 0)
            sizes[int(folder.name)] = 1024 * (fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0))
    family = {process_id}
    while children := {child for child, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(sizes.get(member, 0) for member in family)


_STATUS_FIELDS = ("PPid:", "RssAnon:", "RssShmem:")
