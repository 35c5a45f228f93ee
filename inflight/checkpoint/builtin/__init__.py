"""The small models that ship with the package, for trying it without a checkpoint."""

from pathlib import Path
from typing import Literal

_FOLDER = Path(__file__).parent
# Ordinary checkpoints, by the names under which they are served.
BUILTIN_MODELS = {
    "inflight-builtin": _FOLDER / "checkpoint",
    "inflight-builtin-embedder": _FOLDER / "embedder",
    "inflight-builtin-reranker": _FOLDER / "reranker",
}


def checkpoint_folder() -> Path:
    """Return the folder of the built-in language model."""
    return BUILTIN_MODELS["inflight-builtin"]


def builtin_folder(role: Literal["reranker", "embedder"]) -> Path:
    """Return the folder of the built-in reranker or embedder."""
    return BUILTIN_MODELS[f"inflight-builtin-{role}"]
