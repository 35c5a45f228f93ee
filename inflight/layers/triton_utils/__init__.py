"""Helpers shared by the Triton kernels of several packages: programmatic dependent launch and padded tensors."""
