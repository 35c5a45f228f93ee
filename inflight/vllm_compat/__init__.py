"""Compatibility with vLLM: its flags, options, fields, variables and commands, as data.

Names that differ are translated, names that have no effect here are accepted, and the rest is rejected with a reason.
"""
