"""The models that come with the package, for those who have no checkpoint at hand."""

from pathlib import Path
from typing import Literal


def checkpoint_folder() -> Path:
    """Its checkpoint, laid out as any other."""
    return Path(__file__).parent / "checkpoint"


def builtin_folder(kind: Literal["reranker", "embedder"]) -> Path:
    """The checkpoint of a model that scores or embeds, laid out as any other."""
    return Path(__file__).parent / kind
