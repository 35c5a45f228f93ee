"""Memory that the ranks of one engine share: streams of bytes through rings in it, and collectives of a stage."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from inflight.layers.native.library import Library


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


# A rank that arrives more than PATIENCE seconds after the others is lost. Where these took long themselves (large steps
# on a slow machine), it gets SLOWNESS times as long in addition.
PATIENCE, SLOWNESS = 4.0, 4.0


@dataclass(slots=True)
class SharedCollective:
    """Implements `Collective` for float32 on a CPU.

    Sums are taken in the order of the ranks, element by element: a result depends neither on the rest of the step nor
    on which rank arrived first.
    """

    capturable: ClassVar[bool] = False

    library: Library
    memory: SharedMemory  # keeps the address mapped
    address: int
    rank: int
    size: int
    region: int  # bytes
    spins: int
    on_loss: OnLoss
    watches: bool = False  # whether a rank that does not arrive is lost, or waited for
    _since: float = field(default_factory=time.monotonic)
    _extra: float = 0.0  # seconds

    def begin_step(self) -> None:
        """Start measuring the time that this rank computes."""
        self._since = time.monotonic()

    def allow(self, seconds: float) -> None:
        """Give the other ranks extra time before the next exchange, for work that this rank may have done already."""
        self._extra = seconds

    def sum(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32).contiguous()
        self.call(self.library.group_sum, x.data_ptr(), x.numel())
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        x = x.to(torch.float32).contiguous()
        columns = torch.tensor(widths)
        out = torch.empty(len(x), sum(widths))
        self.call(self.library.group_gather, x.data_ptr(), len(x), columns.data_ptr(), out.data_ptr())
        return out

    def call(self, function: Callable[..., int], *arguments: int | None) -> None:
        """Call a function of the library that all ranks call together."""
        limit = 0
        if self.watches:
            limit = int(1e6 * (PATIENCE + SLOWNESS * (time.monotonic() - self._since) + self._extra))
        group = self.address, self.rank, self.size, self.region, self.spins, limit
        code = function(*group, *arguments)
        if code:
            self.on_loss(code)
        self._since, self._extra = time.monotonic(), 0.0


MAX_EXCHANGE = 255  # bytes


def exchange(shared: SharedCollective, data: bytes) -> list[bytes]:
    """Return the data of all ranks, in order. It is a sum in which each rank fills its own row."""
    assert len(data) <= MAX_EXCHANGE, f"{len(data)} bytes are too many to exchange"
    rows = torch.zeros(shared.size, 1 + MAX_EXCHANGE)
    rows[shared.rank, : 1 + len(data)] = torch.tensor([len(data), *data], dtype=torch.float32)
    return [bytes(values[:count]) for count, *values in shared.sum(rows).int().tolist()]


def all_agree(shared: SharedCollective, mine: bool) -> bool:
    return all(answer == b"1" for answer in exchange(shared, b"1" if mine else b"0"))


class HostCollective:
    """Implements `Collective` for any device and dtype, through the host: correct, but slow.

    Each operation waits for the device, so steps cannot be captured.
    """

    capturable = False

    def __init__(self, shared: SharedCollective) -> None:
        self._shared = shared

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self._shared.sum(x.float().cpu()))

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._shared.gather(x.cpu(), widths).to(x.device)
