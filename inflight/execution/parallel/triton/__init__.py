"""Kernels in which ranks on GPUs exchange data."""
