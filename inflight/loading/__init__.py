"""From a configuration to an engine: the checkpoint is opened, its weights loaded, the KV memory sized."""

from inflight.loading.decoders import load_rank
from inflight.loading.load import load_core, load_engine
from inflight.loading.loaded_engine import LoadedEngine, LoadProgress
from inflight.loading.opened import open_model

__all__ = ["LoadProgress", "LoadedEngine", "load_core", "load_engine", "load_rank", "open_model"]
