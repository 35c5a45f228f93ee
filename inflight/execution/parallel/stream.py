"""Bytes from one rank to others, in order, through a ring in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from inflight.execution.parallel.shared_memory import SharedMemory
from inflight.native.library import Library

# Raises what there is to say when a wait was in vain: -1, the group is lost; 1 + r, rank r of the group did not come.
OnLoss = Callable[[int], NoReturn]

_LENGTH = 8  # bytes that say how many follow


@dataclass(frozen=True, slots=True)
class SharedStream:
    """One writer, `num_readers` readers. A writer waits only when the ring is full."""

    library: Library
    memory: SharedMemory  # which stays mapped as long as this is used
    address: int
    group: int  # the address of the group whose loss ends every wait
    num_readers: int
    capacity: int
    spins: int
    on_loss: OnLoss

    def send(self, message: bytes) -> None:
        data = len(message).to_bytes(_LENGTH, "little") + message
        self.write(data, len(data))

    def write(self, data: bytes | int, count: int) -> None:
        """`data` are bytes, or their address."""
        ring = self.address, self.group, self.num_readers, self.capacity, self.spins
        code = self.library.stream_write(*ring, data, count)
        if code:
            self.on_loss(code)

    def receive(self, reader: int) -> memoryview:
        """The next message."""
        length = ctypes.create_string_buffer(_LENGTH)
        self.read(reader, ctypes.addressof(length), _LENGTH)
        count = int.from_bytes(length.raw, "little")
        data = ctypes.create_string_buffer(count)
        self.read(reader, ctypes.addressof(data), count)
        return memoryview(data)

    def read(self, reader: int, address: int, count: int) -> None:
        """Exactly `count` bytes to `address`."""
        ring = self.address, self.group, reader, self.capacity, self.spins
        code = self.library.stream_read(*ring, address, count)
        if code:
            self.on_loss(code)
