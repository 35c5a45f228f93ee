"""HTTP over the engine: OpenAI's API, bounded and observable. Imported only by those who serve."""
