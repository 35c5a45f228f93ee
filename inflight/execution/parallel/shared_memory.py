"""Memory that the ranks of one engine share."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile


class SharedMemory:
    """A file without a name, mapped: when the last process that has it is gone, so is it. Pages that nobody has touched
    take no memory."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """New, zeroed memory, or with a `descriptor` what another process has made."""
        if descriptor is None:
            descriptor = _anonymous_file()
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self._view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._view)

    def close(self) -> None:
        del self._view
        self._map.close()
        os.close(self.descriptor)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inflight-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
