"""Kernels in which ranks on GPUs meet."""
