"""`inflight bench serve`: load for any server that speaks OpenAI's API, and what it measured."""
