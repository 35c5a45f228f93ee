"""/v1/messages, as Anthropic's API has it: from its blocks to a conversation, and from the answer to its events."""
