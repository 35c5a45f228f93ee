"""Sampling for CUDA graphs: four kernel launches for any mix of parameters."""
