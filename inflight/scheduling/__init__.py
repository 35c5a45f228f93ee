"""Decides which requests run in each step. No tensors and no clock: times are passed in."""
