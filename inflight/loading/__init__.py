"""From a config to an engine: open the checkpoint, load the weights, size the KV cache."""
