"""From a config to an engine: open the checkpoint, load the weights, size the KV cache."""

from inflight.loading.checkpoint import open_model
from inflight.loading.engine import LoadedEngine, LoadProgress
from inflight.loading.load import load_core, load_engine, load_rank

__all__ = ["LoadProgress", "LoadedEngine", "load_core", "load_engine", "load_rank", "open_model"]
