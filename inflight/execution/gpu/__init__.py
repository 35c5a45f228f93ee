"""The runner for GPUs: permanent rows, one packed upload per step, one CUDA graph per shape."""
