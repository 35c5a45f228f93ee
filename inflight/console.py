"""What commands have in common: packages that may be missing, files to write, a bar of progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.errors import ConfigError


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """In it, a package that is not installed is told with what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "inflight"):
            raise
        raise ConfigError(f"{package} is missing: pip install 'inflight-llm[{name}]'") from None


def check_writable(path: Path) -> None:
    """Before anything is measured, not after."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{str(path)!r} cannot be written: it must be a file in a folder that exists")


def progress_bar() -> Progress:
    """On standard error, and gone at the end. Drawn seldom: what draws takes time from what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
