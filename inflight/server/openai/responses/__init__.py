"""/v1/responses: from its items to a conversation, from the answer to its events, and what is kept of both."""
