"""Paged attention in Triton: one item of work per program, planned on the host, on grids that a CUDA graph can hold."""
