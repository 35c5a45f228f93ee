"""Memory of a GPU that other processes can reach, and memory of the host that a GPU can look at: what torch has no
functions for, straight from the driver."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from inflight.errors import EngineError

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_PORTABLE, _ON_DEVICE = 1, 2
_PAGE = 4096


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class PeerMemory:
    """Zeroed memory of this process on its device (or none), that of others as this process sees it, and a word of the
    host's memory. In the thread that makes it the device must be the current one, as it is after
    `torch.cuda.set_device`."""

    def __init__(self, size: int) -> None:
        torch.cuda.synchronize()  # there is a context from here on
        self._opened: list[int] = []
        self._registered: list[int] = []
        self.address = 0
        if size:
            place = ctypes.c_uint64()
            _call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
            self.address = place.value
            _call("cuMemsetD8_v2", place, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            torch.cuda.synchronize()

    @property
    def handle(self) -> bytes:
        """By which another process finds this memory."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory, here. Fails where this device cannot reach the other's."""
        place = ctypes.c_uint64()
        found = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(place), found, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        self._opened.append(place.value)
        return place.value

    def see(self, address: int) -> int:
        """The address, on the device, of the page of host memory that begins here."""
        host, place = ctypes.c_void_p(address), ctypes.c_uint64()
        flags = ctypes.c_uint(_PORTABLE | _ON_DEVICE)
        _call("cuMemHostRegister_v2", host, ctypes.c_size_t(_PAGE), flags)
        self._registered.append(address)
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(place), host, ctypes.c_uint(0))
        return place.value

    def close(self) -> None:
        """When no kernel will use it any more."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # the device is lost, and its memory with it
            return
        for opened in self._opened:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(opened))
        for registered in self._registered:
            _call("cuMemHostUnregister", ctypes.c_void_p(registered))
        if self.address:
            _call("cuMemFree_v2", ctypes.c_uint64(self.address))
        self._opened, self._registered = [], []


def copy_on_device(to: int, address: int, count: int, stream: torch.cuda.Stream) -> None:
    """Bytes, when the stream comes to it; either address may be of another device."""
    places = ctypes.c_uint64(to), ctypes.c_uint64(address)
    _call("cuMemcpyAsync", *places, ctypes.c_size_t(count), ctypes.c_void_p(stream.cuda_stream))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise EngineError(f"{name} failed: {(text.value or b'?').decode()}")
