"""KV memory in blocks: their number, their holders and their content. No tensors."""
