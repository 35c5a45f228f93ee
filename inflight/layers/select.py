"""Which kernels a device gets."""

from __future__ import annotations

from inflight.layers.native_kernels import NativeKernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.native.library import native_library


def cpu_kernels() -> NativeKernels | TorchKernels:
    """The compiled kernels, or plain torch where they cannot be had."""
    library = native_library()
    return TorchKernels() if library is None else NativeKernels(library)
