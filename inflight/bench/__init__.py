"""The `inflight bench serve` command: a load generator for any server with OpenAI's streaming API."""
