"""Ends connections whose client does not read what it is sent."""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle, Transport

MIN_PROGRESS = 16 << 10  # bytes in the time allowed; sockets take them in lumps of about this size


class WriteTimer:
    """Runs while there is something that the client should read. The transport itself would wait for ever, also once it
    was told to close."""

    def __init__(self, loop: AbstractEventLoop, transport: Transport, seconds: float) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._size = 0  # bytes to be read when the time began
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """The time begins, again if it has begun. From now on nothing is written until `stop`, or another `start`."""
        self.stop()
        self._size = self._transport.get_write_buffer_size()
        if self._size:
            self._timer = self._loop.call_later(self._seconds, self.check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """The time is over."""
        size = self._transport.get_write_buffer_size()
        if size and self._size - size < MIN_PROGRESS:
            self._transport.abort()
        else:
            self.start()
