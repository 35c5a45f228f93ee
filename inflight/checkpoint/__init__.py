"""Checkpoint folders and files, which are not trusted: what they hold, without tensors."""
