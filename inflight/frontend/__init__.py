"""Between text and token ids: prompts become requests, and deltas become outputs."""
