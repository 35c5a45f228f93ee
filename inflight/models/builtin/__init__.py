"""The model that comes with the package, for those who have no checkpoint at hand."""

from pathlib import Path


def checkpoint_folder() -> Path:
    """Its checkpoint, laid out as any other."""
    return Path(__file__).parent / "checkpoint"
