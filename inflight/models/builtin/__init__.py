"""The small models that ship with the package, for trying it without a checkpoint."""

from pathlib import Path
from typing import Literal


def checkpoint_folder() -> Path:
    """Return the folder of the built-in language model, an ordinary checkpoint."""
    return Path(__file__).parent / "checkpoint"


def builtin_folder(kind: Literal["reranker", "embedder"]) -> Path:
    """Return the folder of the built-in reranker or embedder, an ordinary checkpoint."""
    return Path(__file__).parent / kind
