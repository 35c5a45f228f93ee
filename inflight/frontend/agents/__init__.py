"""Parsing and constraining tool calls and reasoning in model output.

Text and token ids go in, events come out. This package knows nothing about requests or servers.
"""
