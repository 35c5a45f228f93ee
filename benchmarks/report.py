"""One way to print results: a table for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


class Progress:
    """What is known so far, as soon as it is, on standard error; and when to begin nothing new."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: after which time is up."""
        self._start = time.perf_counter()
        self._seconds = seconds

    def tell(self, text: str) -> None:
        print(f"{time.perf_counter() - self._start:6.1f} s  {text}", file=sys.stderr, flush=True)

    @property
    def seconds_left(self) -> float:
        return self._seconds - (time.perf_counter() - self._start)

    @property
    def is_late(self) -> bool:
        return self.seconds_left < 0


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], as_json: bool, data: dict[str, Any]
) -> None:
    """Print `rows` as a table, or `data` as one JSON object."""
    if as_json:
        print(json.dumps(data))
        return
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
