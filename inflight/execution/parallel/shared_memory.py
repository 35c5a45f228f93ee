"""Memory that the ranks of one engine share, and streams of bytes through rings in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from inflight.native.library import Library


class SharedMemory:
    """A mapped anonymous file, which disappears with the last process that has it. Untouched pages take no memory."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Create zeroed memory, or with a `descriptor` map that of another process."""
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


# Raises the error for a failed wait. Codes: -1, the group is lost; 1 + r, rank r of the group did not arrive.
OnLoss = Callable[[int], NoReturn]

_LENGTH = 8  # bytes of the length prefix


@dataclass(frozen=True, slots=True)
class SharedStream:
    """A stream from one writer to `num_readers` readers. The writer waits only if the ring is full."""

    library: Library
    memory: SharedMemory  # keeps the address mapped
    address: int
    group: int  # address of the group whose loss ends every wait
    num_readers: int
    capacity: int
    spins: int
    on_loss: OnLoss

    def send(self, message: bytes) -> None:
        data = len(message).to_bytes(_LENGTH, "little") + message
        self.write(data, len(data))

    def write(self, data: bytes | int, count: int) -> None:
        """Write `count` bytes; `data` are the bytes, or their address."""
        ring = self.address, self.group, self.num_readers, self.capacity, self.spins
        code = self.library.stream_write(*ring, data, count)
        if code:
            self.on_loss(code)

    def receive(self, reader: int) -> memoryview:
        """Return the next message."""
        length = ctypes.create_string_buffer(_LENGTH)
        self.read(reader, ctypes.addressof(length), _LENGTH)
        count = int.from_bytes(length.raw, "little")
        data = ctypes.create_string_buffer(count)
        self.read(reader, ctypes.addressof(data), count)
        return memoryview(data)

    def read(self, reader: int, address: int, count: int) -> None:
        """Read exactly `count` bytes to `address`."""
        ring = self.address, self.group, reader, self.capacity, self.spins
        code = self.library.stream_read(*ring, address, count)
        if code:
            self.on_loss(code)
