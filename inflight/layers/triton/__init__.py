"""Triton kernels around and instead of the matrix products."""
