"""The runner for GPUs: permanent rows, one packed upload a step, one CUDA graph a shape."""
