"""Routes that are not part of the OpenAI or Anthropic APIs: health, metrics, models, replicas, administration."""
