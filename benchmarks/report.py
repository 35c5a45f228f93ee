"""One way to print results: a table for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


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
