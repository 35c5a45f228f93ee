"""The text, the tokenizer and the training of the small built-in cross-encoder and embedder (see README.md)."""
