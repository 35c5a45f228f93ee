"""Sampling: permanent parameters per row, one token per row and step.

`Sampler` over `SamplingRows` is written in torch; `cpu_sampler` prefers the compiled library.
"""
