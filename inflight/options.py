"""From what users say to a configuration. Knows no tensors: whoever only talks to an engine needs none."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models.builtin import checkpoint_folder


def engine_config(model: str | PathLike[str] | None, options: dict[str, Any]) -> EngineConfig:
    """The configuration of an engine from the options that its user gave, in our names or those of other engines.

    Without a model it is the built-in one.
    """
    options = dict(options)
    for name in ("disable_log_stats", "trust_remote_code"):
        # Statistics cost nothing, code in a model folder is never run.
        options.pop(name, None)
    if options.pop("tensor_parallel_size", 1) != 1:
        raise ConfigError("tensor_parallel_size must be 1: a model runs on one device")
    return EngineConfig.create(model=fspath(checkpoint_folder() if model is None else model), **options)
