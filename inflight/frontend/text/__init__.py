"""Conversion between text and token ids: tokenizer, detokenizer, chat templates and stop strings. No tensors."""
