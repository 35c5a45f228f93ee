"""From a configuration to an engine: the checkpoint is opened, its weights loaded, the KV memory sized."""

from inflight.loading.checkpoint import open_model
from inflight.loading.engine import LoadedEngine, LoadProgress
from inflight.loading.load import load_core, load_engine, load_rank

__all__ = ["LoadProgress", "LoadedEngine", "load_core", "load_engine", "load_rank", "open_model"]
