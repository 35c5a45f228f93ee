"""The text, the tokenizer and the training of the small built-in model (see README.md)."""
