"""What commands that measure have in common."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.errors import ConfigError


def check_writable(path: Path) -> None:
    """Before anything is measured, not after."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{str(path)!r} cannot be written: it must be a file in a folder that exists")


def progress_bar() -> Progress:
    """On standard error, and gone at the end. Drawn seldom: what draws takes time from what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
