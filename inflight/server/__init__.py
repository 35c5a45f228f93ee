"""The HTTP server: OpenAI's and Anthropic's APIs over the engine. Imported only by commands that serve."""
