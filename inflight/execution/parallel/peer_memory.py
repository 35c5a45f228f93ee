"""GPU memory shared between processes, and host memory mapped into a GPU, by the CUDA driver API: torch has no
functions for these."""

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
    """Zeroed device memory of this process (or none), mappings of other processes' memory, and mapped host pages.

    The device must be the current one of the thread that creates this (`torch.cuda.set_device`).
    """

    def __init__(self, size: int) -> None:
        torch.cuda.synchronize()  # creates the CUDA context
        self._opened: list[int] = []
        self._registered: list[int] = []
        self.address = 0
        if size:
            pointer = ctypes.c_uint64()
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            self.address = pointer.value
            _call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            torch.cuda.synchronize()

    @property
    def handle(self) -> bytes:
        """The IPC handle by which another process opens this memory."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory and return its address. Raises EngineError if the device cannot reach it."""
        pointer = ctypes.c_uint64()
        peer = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), peer, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        self._opened.append(pointer.value)
        return pointer.value

    def map_host_page(self, address: int) -> int:
        """Map the page of host memory at `address` into the device, and return its device address."""
        host, pointer = ctypes.c_void_p(address), ctypes.c_uint64()
        flags = ctypes.c_uint(_PORTABLE | _ON_DEVICE)
        _call("cuMemHostRegister_v2", host, ctypes.c_size_t(_PAGE), flags)
        self._registered.append(address)
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), host, ctypes.c_uint(0))
        return pointer.value

    def close(self) -> None:
        """Free everything, when no kernel will use it any more."""
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
    """Enqueue a copy of `count` bytes on the stream; either address may belong to another device."""
    pointers = ctypes.c_uint64(to), ctypes.c_uint64(address)
    _call("cuMemcpyAsync", *pointers, ctypes.c_size_t(count), ctypes.c_void_p(stream.cuda_stream))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise EngineError(f"{name} failed: {(text.value or b'?').decode()}")
